"""The proof that a generated class equals upstream's: same structure, same numbers, same checkpoints.

Everything is compared in fp32, with eager attention and experts, from the same weights:

    structure    no live module of upstream's file, the same parameters and buffers by name, shape and dtype
    eager seams  outputs (loss, logits, router logits, ...) and every gradient, bit for bit; but for rounding where a list
                 of experts became stacks
    fused seams  loss and every gradient within 1e-4 relative, and the kernel was really called
    round trip   a checkpoint saved by one is loaded whole by the other

What a run computes instead, with its own attention, kernels and packed rows, is compared in `training_path.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from patchgen.runtime.verify import verdict
from patchgen.runtime.verify.comparison import (
    EQUAL,
    Difference,
    Step,
    compare_gradients,
    compare_outputs,
    train_step,
)
from patchgen.runtime.verify.conditioning import ROUNDING, SHAKES, WELL_CONDITIONED, is_rounding, shaken_step
from patchgen.runtime.verify.inputs import Case
from patchgen.runtime.verify.model_pair import ModelPair, build_pair, enable_checkpointing
from patchgen.runtime.verify.round_trip import round_trip_problems
from patchgen.runtime.verify.seam_proof import FAILED, SeamResult, all_eager, prove_seams

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from patchgen.runtime.verify.training_path import TrainingPath

REORDERED = 1e-6
"""The relative difference that is equal where a list of experts became stacks; beyond it, what rounding alone moves."""
NUM_NAMED = 3
"""How many of several like failures are named; the others are counted."""


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
    dead_parameters: tuple[str, ...]
    """Parameters that upstream's own step gives no gradient: this case says nothing about them."""


@dataclass
class Proof:
    """What was compared, and everything that failed."""

    model: str
    head: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    """What the small config was given, for a reader to see what ran."""
    cases: list[CaseResult] = field(default_factory=list)
    seams: list[SeamResult] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Variants that upstream's own config class refuses, with its reason."""
    refused_inputs: dict[str, str] = field(default_factory=dict)
    """Multimodal inputs that upstream's own class refuses, with its reason."""
    not_compared: dict[str, str] = field(default_factory=dict)
    """Modalities that the head takes and that were in no case, with the reason: what is said of the others holds not for
    them."""
    inputs: tuple[str, ...] = ()
    """The names of all tensors that its cases held."""
    upstream_version: str | None = ""
    """Of transformers; None: it was made from a file."""
    file_sha256: str = ""
    """Of the generated file."""
    unclassified: tuple[str, ...] = ()
    """Large config fields whose meaning no rule knew: they kept upstream's value."""
    training: TrainingPath | None = None
    """The comparison as a run computes; None where it was not made."""

    @property
    def is_equal(self) -> bool:
        """Whether at least one case ran and nothing failed: the generated class computes what upstream's does."""
        return bool(self.cases) and not self.failures

    @property
    def is_proven(self) -> bool:
        """Whether it also does so on the path that a run takes."""
        return verdict.of(self).status == verdict.PROVEN

    @property
    def dead_parameters(self) -> tuple[str, ...]:
        """Parameters that no case exercised."""
        if not self.cases:
            return ()
        dead = set.intersection(*(set(case.dead_parameters) for case in self.cases))
        return tuple(name for name in self.cases[0].dead_parameters if name in dead)


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
        variant: what distinguishes this config, for the record.
        gradient_checkpointing: whether both models recompute their layers in the backward pass.
        training: whether the models are in training mode; gradients are compared in both.
        implementations: names of the implementations of seams to compare; None for all, empty for none.
        round_trip: whether checkpoints are exchanged.
    """
    proof = Proof(type(config).model_type, upstream_class.__name__)
    pair = build_pair(upstream_class, generated_class, config)
    proof.foreign = pair.foreign
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
        with all_eager():
            actual = train_step(pair.generated, case, training=training)
        first = first or (case, expected)
        reordered = (
            None if pair.correspondence.is_identity else _Reordered(pair.upstream, upstream_step, actual, expected)
        )
        result, failures = _compare(case.name, variant, actual, expected, reordered)
        proof.cases.append(result)
        proof.failures += failures
    if first is not None and not proof.failures:
        proof.seams = prove_seams(pair.generated, *first, implementations)
        proof.failures += [
            f"seam {result.seam}={result.implementation}: {result.reason}"
            for result in proof.seams
            if result.status == FAILED
        ]
    if round_trip:
        proof.failures += round_trip_problems(pair)
    return proof


def merge(proofs: Iterable[Proof]) -> Proof:
    """One proof of a model from the proofs of its variants; the first gives the name, the overrides and the seams."""
    first, *others = proofs
    for proof in others:
        first.cases += proof.cases
        first.failures += proof.failures
        first.refused_inputs |= proof.refused_inputs
    return first


def _upstream_step(pair: ModelPair, case: Case, training: bool, upstream: nn.Module) -> Step:
    with all_eager():
        return pair.correspondence.step(train_step(upstream, case, training=training))


@dataclass
class _Reordered:
    """What counts as equal where lists of experts became stacks: one product of matrices computes what two did."""

    upstream: nn.Module
    step: Callable[[nn.Module], Step]
    actual: Step
    expected: Step

    @functools.cached_property
    def shaken(self) -> list[Step]:
        return [shaken_step(self.upstream, self.step, seed) for seed in range(SHAKES)]

    def excuses(self, key: str, found: Difference) -> bool:
        if found.relative <= REORDERED or found.relative > ROUNDING * WELL_CONDITIONED:
            return found.relative <= REORDERED
        return is_rounding(key, self.actual, self.expected, self.shaken)


def _compare(
    name: str, variant: str, actual: Step, expected: Step, reordered: _Reordered | None
) -> tuple[CaseResult, list[str]]:
    outputs = compare_outputs(actual, expected)
    gradients = compare_gradients(actual, expected)
    where = f"case {name}, variant {variant}"
    failures = _failures(f"{where}: output", outputs, reordered, "")
    failures += _failures(f"{where}: gradient of", gradients, reordered, "gradient of ")
    dead = expected.dead()
    if len(dead) == len(gradients):
        failures.append(f"{where}: upstream's own step gives no parameter a gradient, so nothing was compared.")
    if not all(tensor.isfinite().all() for key, tensor in expected.outputs.items() if key in ("loss", "logits")):
        failures.append(f"{where}: upstream's own loss or logits are not finite.")
    return CaseResult(
        name=name,
        variant=variant,
        loss=outputs.get("loss", EQUAL),
        logits=outputs.get("logits", EQUAL),
        outputs=_worst(outputs),
        gradient=_worst(gradients),
        num_parameters=len(gradients),
        dead_parameters=tuple(dead),
    ), failures


def _failures(
    what: str, differences: Mapping[str, Difference], reordered: _Reordered | None, prefix: str
) -> list[str]:
    failing = {name: found for name, found in differences.items() if not found.is_equal}
    if reordered is not None:
        failing = {name: one for name, one in failing.items() if not reordered.excuses(prefix + name, one)}
    named = sorted(failing.items(), key=lambda item: -item[1].relative)[:NUM_NAMED]
    failures = [f"{what} '{name}' differs: {_describe(found)}." for name, found in named]
    if len(failing) > NUM_NAMED:
        failures.append(f"{what} ... and {len(failing) - NUM_NAMED} more.")
    return failures


def _describe(found: Difference) -> str:
    if found.absolute == float("inf"):
        return "it exists on one side only, or its shape or dtype differs"
    return f"absolute {found.absolute:.1e}, relative {found.relative:.1e}"


def _worst(differences: Mapping[str, Difference]) -> Difference:
    worst = EQUAL
    for found in differences.values():
        worst = worst.worst(found)
    return worst
