"""The proof that a generated class equals upstream's: same structure, same numbers, same checkpoints.

Everything is compared in fp32, with eager attention and experts, from the same weights:

    structure    no live module of upstream's file, the same parameters and buffers by name, shape and dtype
    eager seams  outputs (loss, logits, router logits, ...) and every gradient, bit for bit; up to rounding where a list
                 of experts became stacks; and the caller's batch is as it was
    fused seams  loss and every gradient within 1e-4 relative, and the kernel was actually called
                 with large weights (`large_weights.py`) and the batch of another caller than patchgen's trainer
    extremes     one case with large weights in the eager form, too, and one in bf16 (`bf16.py`)
    round trip   each loads the checkpoint that the other saved, completely

The path of a training run, with its own attention, kernels and packed rows, is compared in `training_path.py`, and the class
on two ranks in `two_ranks.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.verify import bf16, verdict
from patchgen.runtime.verify.comparison import (
    EQUAL,
    Difference,
    Step,
    compare_gradients,
    compare_outputs,
    nan_is_largest,
    train_step,
    worst_of,
)
from patchgen.runtime.verify.conditioning import beyond_rounding
from patchgen.runtime.verify.inputs import OTHER_CALLER, Case
from patchgen.runtime.verify.large_weights import large_weights
from patchgen.runtime.verify.model_pair import ModelPair, build_pair, enable_checkpointing
from patchgen.runtime.verify.observe import lines
from patchgen.runtime.verify.round_trip import round_trip_problems
from patchgen.runtime.verify.seam_proof import FAILED, SeamResult, all_eager, prove_seams

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from patchgen.runtime.verify.training_path import TrainingPath
    from patchgen.runtime.verify.two_ranks import LayoutResult

REORDERING_TOLERANCE = 1e-6
"""The relative difference that passes where a list of experts became stacks, since one matrix product computes what two did;
beyond it, what rounding alone explains."""
LARGE_WEIGHTS, BF16 = "large weights", "bf16"
NUM_NAMED = 3
"""How many failures of a kind are named; the others are counted."""


@dataclass(frozen=True)
class CaseResult:
    """One input through both models."""

    name: str
    variant: str
    loss: Difference
    logits: Difference
    outputs: Difference
    """The worst over all outputs, loss and logits included."""
    gradient: Difference
    """The worst over all parameters."""
    num_parameters: int
    without_gradient: tuple[str, ...]
    """Parameters that upstream's own step gives no gradient: this case says nothing about them."""


@dataclass
class Proof:
    """What was compared, and everything that failed."""

    model: str
    head: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    """The fields that the small config sets."""
    cases: list[CaseResult] = field(default_factory=list)
    seams: list[SeamResult] = field(default_factory=list)
    foreign_classes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refused_variants: dict[str, str] = field(default_factory=dict)
    """Variants that upstream's own config class refuses, with its reason."""
    refused_inputs: dict[str, str] = field(default_factory=dict)
    """Multimodal inputs that upstream's own class refuses, with its reason."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Cases that upstream's own class cannot compute, and why."""
    changed_inputs: dict[str, None] = field(default_factory=dict)
    """Names of tensors that a step changes in its caller's batch, upstream as well as generated."""
    not_compared: dict[str, str] = field(default_factory=dict)
    """Modalities that the head takes and no case contained, with the reason: the proof does not cover them."""
    inputs: tuple[str, ...] = ()
    """The names of all tensors in its cases."""
    upstream_version: str | None = ""
    """Of transformers; None: the model was generated from a file."""
    file_sha256: str = ""
    """Of the generated file."""
    unclassified: tuple[str, ...] = ()
    """Config fields with a large value that no rule covers: they kept upstream's value."""
    training: TrainingPath | None = None
    """The comparison on the training path; None if there was none."""
    two_ranks: Mapping[str, LayoutResult] | None = None
    code_on_ranks: set[str] = field(default_factory=set)
    """The comparison on two ranks, by layout; None if there was none."""
    executed_lines: set[int] = field(default_factory=set)
    """Lines of the generated file that ran when it was built and in its cases."""
    not_run: tuple[str, ...] = ()
    """Lines in functions of the generated file that no part of the proof ran, as "12" or "15-18"."""

    @property
    def is_equal(self) -> bool:
        """Whether at least one case ran and nothing failed: the generated class computes what upstream's does."""
        return bool(self.cases) and not self.failures

    @property
    def is_proven(self) -> bool:
        """Whether the verdict is "proven": equal on the training path, too, with nothing left uncompared."""
        return verdict.of(self).status == verdict.PROVEN

    @property
    def without_gradient(self) -> tuple[str, ...]:
        """Parameters that no case exercised."""
        if not self.cases:
            return ()
        in_no_case = set.intersection(*(set(case.without_gradient) for case in self.cases))
        return tuple(name for name in self.cases[0].without_gradient if name in in_no_case)


def prove(
    upstream_class: type[PreTrainedModel],
    generated_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    cases: Iterable[Case],
    *,
    variant: str = "base",
    gradient_checkpointing: bool = False,
    training: bool = True,
    implementations: Collection[str] | None = None,
    round_trip: bool = True,
    extremes: bool = False,
) -> Proof:
    """Proves `generated_class` against `upstream_class` on one config.

    Args:
        cases: the inputs; the fused seams run on that of another caller, or on the first.
        variant: the name of this config in the record.
        gradient_checkpointing: whether both models recompute their layers in the backward pass.
        training: whether the models are in training mode; gradients are compared in either.
        implementations: names of the seam implementations to compare; None for all, empty for none.
        round_trip: whether checkpoints are exchanged.
        extremes: whether a case is compared in bf16, and one with large weights, with which the seams are proven then.
    """
    proof = Proof(type(config).model_type, upstream_class.__name__)
    with lines.executed(inspect.getfile(generated_class)) as proof.executed_lines:
        pair = build_pair(upstream_class, generated_class, config)
    proof.foreign_classes = pair.foreign_classes
    proof.failures += pair.problems
    if pair.problems:
        return proof
    if gradient_checkpointing:
        enable_checkpointing(pair.upstream)
        enable_checkpointing(pair.generated)
    comparison = _Comparison(proof, pair, variant, training)
    first: Case | None = None
    through_seams: Case | None = None
    for case in cases:
        comparison.run(case)
        if case.name in proof.left_out:
            continue
        first = first or case
        if case.name == OTHER_CALLER:
            through_seams = case
    if first is not None and not proof.failures:
        comparison.prove_seams(through_seams or first, implementations, large=extremes)
        if extremes:
            comparison.run_in_bf16(first, config)
        proof.failures += [
            f"seam {result.seam}={result.implementation}: {result.reason}"
            for result in proof.seams
            if result.status == FAILED
        ]
    if round_trip:
        proof.failures += round_trip_problems(pair)
    return proof


def merge(proofs: Iterable[Proof]) -> Proof:
    """One proof of a model from the proofs of its variants; all but cases, failures, refused inputs and executed lines are those of
    the first."""
    first, *others = proofs
    for proof in others:
        first.cases += proof.cases
        first.failures += proof.failures
        first.refused_inputs |= proof.refused_inputs
        first.changed_inputs |= proof.changed_inputs
        first.executed_lines |= proof.executed_lines
    return first


class _Comparison:
    """Compares a pair of models on one case after the other, and adds what it finds to a proof."""

    def __init__(self, proof: Proof, pair: ModelPair, variant: str, training: bool) -> None:
        self.proof, self.pair, self.variant, self.training = proof, pair, variant, training

    def run(self, case: Case, expected: Step | None = None) -> None:
        """One case, with upstream's step if it is known. That of another caller is left out if upstream cannot compute it."""
        if expected is None:
            get_step = self._upstream_step_if_any if case.name == OTHER_CALLER else self._upstream_step
            expected = get_step(case, self.pair.upstream)
            if expected is None:
                return
        actual = self._generated_step(case, self.pair.generated)
        outputs, gradients, unequal = _compared(actual, expected)
        if not self.pair.correspondence.is_identity:
            beyond = {key: value for key, value in unequal.items() if not value.relative <= REORDERING_TOLERANCE}
            step = functools.partial(self._upstream_step, case)
            unequal = beyond_rounding(beyond, actual, expected, self.pair.upstream, step)
        self._add(case, outputs, gradients, unequal, actual, expected)

    def prove_seams(self, case: Case, implementations: Collection[str] | None, *, large: bool) -> None:
        """Each seam on a case: with large weights, after a comparison of the eager form, unless upstream cannot compute it then."""
        pair = self.pair
        if large:
            extreme = replace(case, name=LARGE_WEIGHTS)
            with large_weights(pair.upstream, pair.generated, pair.correspondence):
                expected = self._upstream_step_if_any(extreme, pair.upstream)
                if expected is not None:
                    self.run(extreme, expected)
                    self._prove_seams_on(case, expected, implementations)
                    return
        self._prove_seams_on(case, self._upstream_step(case, pair.upstream), implementations)

    def _prove_seams_on(self, case: Case, expected: Step, implementations: Collection[str] | None) -> None:
        self.proof.seams = prove_seams(self.pair.generated, case, expected, implementations, training=self.training)

    def run_in_bf16(self, case: Case, config: PreTrainedConfig) -> None:
        """The case in bf16, from the same weights."""
        pair = self.pair
        with bf16.rounded(pair.upstream):
            weights = pair.upstream.state_dict()
            upstream = bf16.model_in_bf16(type(pair.upstream), config, weights)
            case = replace(case, name=BF16, batch=bf16.inputs_in_bf16(case.batch))
            expected = self._upstream_step_if_any(case, upstream)
            if expected is None:
                return
            generated = bf16.model_in_bf16(type(pair.generated), config, pair.correspondence.to_generated(weights))
            actual = self._generated_step(case, generated)
            outputs, gradients, unequal = _compared(actual, expected)
            if unequal and not pair.correspondence.is_identity:
                exact = self._upstream_step(case, pair.upstream)
                far = bf16.further_than_upstream(actual, expected, exact)
                unequal = {key: value for key, value in unequal.items() if key in far or not value.has_same_form}
                self.proof.left_out |= bf16.left_out(expected, exact)
        self._add(case, outputs, gradients, unequal, actual, expected)

    def _upstream_step(self, case: Case, upstream: nn.Module) -> Step:
        with all_eager():
            return self.pair.correspondence.step(train_step(upstream, case, training=self.training))

    def _upstream_step_if_any(self, case: Case, upstream: nn.Module) -> Step | None:
        """Upstream's step; None, and the case is left out, if its class refuses it or computes what is not finite."""
        try:
            step = self._upstream_step(case, upstream)
        except Exception as error:  # an operation may have no form in bf16, or none on this device
            reraise_machine_failure(error)
            self.proof.left_out[case.name] = f"upstream's own class fails: {verdict.one_line_error(error)}"
            return None
        if step.not_finite:
            self.proof.left_out[case.name] = f"upstream's own {step.not_finite} are not finite."
            return None
        return step

    def _generated_step(self, case: Case, generated: nn.Module) -> Step:
        with all_eager(), lines.executed(inspect.getfile(type(generated))) as run:
            step = train_step(generated, case, training=self.training)
        self.proof.executed_lines |= run
        return step

    def _add(
        self,
        case: Case,
        outputs: Mapping[str, Difference],
        gradients: Mapping[str, Difference],
        unequal: Mapping[str, Difference],
        actual: Step,
        expected: Step,
    ) -> None:
        subject = f"case {case.name}, variant {self.variant}"
        self.proof.cases.append(_case_result(case.name, self.variant, outputs, gradients, expected))
        self.proof.failures += _failures(subject, unequal, expected)
        self.proof.changed_inputs |= dict.fromkeys(expected.changed_inputs)
        self.proof.failures += [
            f"{subject}: the step changes its caller's '{name}' in place, upstream's does not."
            for name in actual.changed_inputs
            if name not in expected.changed_inputs
        ]


def _compared(
    actual: Step, expected: Step
) -> tuple[dict[str, Difference], dict[str, Difference], dict[str, Difference]]:
    """The differences of outputs and of gradients, and those that are not equal by the names that failures give them."""
    outputs, gradients = compare_outputs(actual, expected), compare_gradients(actual, expected)
    named = outputs | {f"gradient of {name}": deviation for name, deviation in gradients.items()}
    return outputs, gradients, {name: deviation for name, deviation in named.items() if not deviation.is_equal}


def _case_result(
    name: str, variant: str, outputs: Mapping[str, Difference], gradients: Mapping[str, Difference], expected: Step
) -> CaseResult:
    return CaseResult(
        name=name,
        variant=variant,
        loss=outputs.get("loss", EQUAL),
        logits=outputs.get("logits", EQUAL),
        outputs=worst_of(outputs.values()),
        gradient=worst_of(gradients.values()),
        num_parameters=len(gradients),
        without_gradient=tuple(expected.parameters_without_gradient()),
    )


def _failures(subject: str, unequal: Mapping[str, Difference], expected: Step) -> list[str]:
    """What is wrong with a case: the worst differing outputs and gradients, and an upstream step that tests nothing."""
    failures = []
    for kind, is_gradient in (("output", False), ("gradient of", True)):
        keys = [key for key in unequal if key.startswith("gradient of ") == is_gradient]
        ranked = sorted(keys, key=lambda key: nan_is_largest(unequal[key].relative), reverse=True)
        failures += [
            f"{subject}: {kind} '{key.removeprefix('gradient of ')}' differs: {_describe(unequal[key])}."
            for key in ranked[:NUM_NAMED]
        ]
        if len(ranked) > NUM_NAMED:
            failures.append(f"{subject}: {kind} ... and {len(ranked) - NUM_NAMED} more.")
    if len(expected.parameters_without_gradient()) == len(expected.gradients):
        failures.append(f"{subject}: upstream's own step gives no parameter a gradient, so nothing was compared.")
    if expected.not_finite:
        failures.append(f"{subject}: upstream's own {expected.not_finite} are not finite.")
    return failures


def _describe(deviation: Difference) -> str:
    return deviation.not_measurable or f"absolute {deviation.absolute:.1e}, relative {deviation.relative:.1e}"
