"""The proof that a generated class equals upstream's: same structure, same numbers, same checkpoints.

Everything is compared in fp32, with eager attention and experts, from the same weights:

    structure    no live module of upstream's file, the same parameters and buffers by name, shape and dtype
    eager seams  outputs (loss, logits, router logits, ...) and every gradient, bit for bit; up to rounding where a list
                 of experts became stacks
    fused seams  loss and every gradient within 1e-4 relative, and the kernel was actually called
    round trip   each loads the checkpoint that the other saved, completely

The path of a training run, with its own attention, kernels and packed rows, is compared in `training_path.py`, and the class
on two ranks in `two_ranks.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from patchgen.runtime.verify import verdict
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
from patchgen.runtime.verify.inputs import Case
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
) -> Proof:
    """Proves `generated_class` against `upstream_class` on one config.

    Args:
        cases: the inputs; the fused seams run on the first.
        variant: the name of this config in the record.
        gradient_checkpointing: whether both models recompute their layers in the backward pass.
        training: whether the models are in training mode; gradients are compared in either.
        implementations: names of the seam implementations to compare; None for all, empty for none.
        round_trip: whether checkpoints are exchanged.
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
    first: tuple[Case, Step] | None = None
    for case in cases:
        upstream_step = functools.partial(_upstream_step, pair, case, training)
        expected = upstream_step(pair.upstream)
        with all_eager(), lines.executed(inspect.getfile(generated_class)) as run:
            actual = train_step(pair.generated, case, training=training)
        proof.executed_lines |= run
        first = first or (case, expected)
        outputs, gradients = compare_outputs(actual, expected), compare_gradients(actual, expected)
        unequal = {name: deviation for name, deviation in outputs.items() if not deviation.is_equal}
        unequal |= {
            f"gradient of {name}": deviation for name, deviation in gradients.items() if not deviation.is_equal
        }
        if not pair.correspondence.is_identity:
            beyond = {key: value for key, value in unequal.items() if not value.relative <= REORDERING_TOLERANCE}
            unequal = beyond_rounding(beyond, actual, expected, pair.upstream, upstream_step)
        proof.cases.append(_case_result(case.name, variant, outputs, gradients, expected))
        proof.failures += _failures(f"case {case.name}, variant {variant}", unequal, expected)
    if first is not None and not proof.failures:
        proof.seams = prove_seams(pair.generated, *first, implementations, training=training)
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
        first.executed_lines |= proof.executed_lines
    return first


def _upstream_step(pair: ModelPair, case: Case, training: bool, upstream: nn.Module) -> Step:
    with all_eager():
        return pair.correspondence.step(train_step(upstream, case, training=training))


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
    if not all(tensor.isfinite().all() for key, tensor in expected.outputs.items() if key in ("loss", "logits")):
        failures.append(f"{subject}: upstream's own loss or logits are not finite.")
    return failures


def _describe(deviation: Difference) -> str:
    return deviation.not_measurable or f"absolute {deviation.absolute:.1e}, relative {deviation.relative:.1e}"
