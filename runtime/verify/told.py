"""What `patchgen verify` says of a class that was generated from a changed source, beyond what it says of the unchanged file.

    found = told.findings(upstream_class, generated_class)
    told.beyond(found, usual)          # the proof fails, or an observed fact limits the layouts; None: it says nothing

A change that the generator does not refuse is silent if this says nothing and the file computes something else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.verify import training_path, verdict, verify_model
from patchgen.runtime.verify.multimodal_inputs import takes_media
from patchgen.runtime.verify.small_config import UPSTREAM_REFUSALS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from patchgen.runtime.verify.observe.facts import Fact

PROOF, FACT, TWO_RANKS = "the proof", "an observed fact", "two ranks"
"""What tells a change."""


@dataclass(frozen=True)
class Told:
    """What tells a change: `PROOF`, `FACT` or `TWO_RANKS`, and its words."""

    by: str
    words: str


@dataclass(frozen=True)
class Findings:
    """What a proof says: why the file is not proven, empty if it is, and the observed facts that limit its layouts."""

    words: str = ""
    facts: tuple[Fact, ...] = ()


def findings(
    upstream_class: type[PreTrainedModel],
    generated_class: type[PreTrainedModel],
    *,
    variants: Iterable[str] | None = None,
    implementations: Collection[str] = (),
) -> Findings:
    """What the proof of a generated class says.

    Args:
        variants: of the config; default: all, which takes ten times as long as "base" alone.
        implementations: those of seams that are compared one by one; the training path compares those of a run in any case.
    """
    try:
        proof = verify_model.prove_classes(
            upstream_class, generated_class, variants=variants, implementations=implementations
        )
    except UPSTREAM_REFUSALS as error:
        reraise_machine_failure(error)
        return Findings(verdict.one_line(f"not compared: {type(error).__name__}: {error}"))
    found = verdict.of(proof)
    if found.status != verdict.PROVEN or proof.training is None:
        return Findings(found.words)
    return Findings(facts=_limiting(proof.training.facts))


def observed(
    upstream_class: type[PreTrainedModel], generated_class: type[PreTrainedModel], config: PreTrainedConfig
) -> Findings:
    """What is observed in steps of a generated class that are compared with nothing: a fraction of a proof's time."""
    try:
        facts = training_path.observed_facts(
            upstream_class, generated_class, config, media=takes_media(upstream_class)
        )
    except UPSTREAM_REFUSALS as error:
        reraise_machine_failure(error)
        return Findings()  # only the proof says what such a class is worth
    return Findings(facts=_limiting(facts))


def beyond(found: Findings, usual: Findings) -> Told | None:
    """What `found` says that `usual`, the findings of the unchanged file, does not."""
    if found.words:
        return Told(PROOF, found.words) if found.words != usual.words else None
    known = {(fact.kind, fact.code) for fact in usual.facts}
    new = next((fact for fact in found.facts if (fact.kind, fact.code) not in known), None)
    return Told(FACT, new.sentence) if new is not None else None


def _limiting(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    return tuple(fact for fact in facts if fact.effect)
