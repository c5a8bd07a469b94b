"""`patchgen verify MODEL`: the proof of one generated model, over the variants of its config."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from patchgen.runtime import registry
from patchgen.runtime.compatibility import digest
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.verify import given_config, head_kinds, verdict
from patchgen.runtime.verify.comparison import train_step
from patchgen.runtime.verify.given_config import GivenConfig
from patchgen.runtime.verify.inputs import Case, caller_cases, text_cases
from patchgen.runtime.verify.model_pair import build_model, config_class_of
from patchgen.runtime.verify.multimodal_inputs import MediaCases, media_cases, takes_media, without_media
from patchgen.runtime.verify.observe import lines
from patchgen.runtime.verify.proof import Proof, merge, prove
from patchgen.runtime.verify.reference_model import Subject, find_generated
from patchgen.runtime.verify.small_config import (
    UPSTREAM_REFUSALS,
    VARIANTS,
    SmallConfig,
    SmallConfigError,
    applicable_variants,
)
from patchgen.runtime.verify.training_path import TrainingPath, merge_paths, prove_training_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

BASE = "base"
CHECKPOINTING = "checkpointing"
TEXT_ALONE = "text alone"
EVALUATION = "evaluation"  # of models that take media, whose towers may differ there
# Variants that change the effect of a mask or a packed batch: the router loss weights tokens by the mask, a window limits
# the attention of each document. They and the first variant run every text case, the others the first case.
VARIANTS_WITH_ALL_CASES = ("router_logits", "window", "no_window")
# Variants with other attention features or other layers: each is compared on the training path.
VARIANTS_ON_TRAINING_PATH = (BASE, "window", "no_window", "experts")


def verify_model(
    model: Subject,
    *,
    head: str | None = None,
    variants: Iterable[str] | None = None,
    implementations: Collection[str] | None = None,
    training_path: bool = True,
) -> Proof:
    """Proves a generated model against its source: the upstream module that `provenance.json` names, or the user's file.

    Args:
        model: the model, its name among the installed ones ("qwen3_moe"), or its folder.
        head: the class to prove; default: the first head in `provenance.json`.
        variants: keys of `small_config.VARIANTS`, "checkpointing" and "evaluation"; default: all that apply to the config.
        implementations: names of the seam implementations to compare (compiled ones take seconds); default: all.
        training_path: also compare the training path, if the eager comparison passes.

    Raises:
        registry.UnknownModelError: no such model, or no such head in it.
        registry.NoUpstreamError: the model was generated from a file on disk that is unknown or has changed.
        SmallConfigError: upstream's config class refuses the base variant.
        ValueError: `variants` is empty.
    """
    generated = find_generated(model)
    head = _require_class(head or generated.heads[0], generated)
    upstream_class = getattr(generated.upstream(), head)
    generated_class = getattr(generated.load(), head)
    given = given_config.read(generated.directory)
    selected = tuple(variants) if variants is not None else _variants(upstream_class, given)
    if not selected:
        raise ValueError("`variants` is empty, so nothing would be proven. To fix: leave it out for all variants.")
    proof = _over_variants((upstream_class, generated_class), given, selected, implementations, training_path)
    run = proof.executed_lines | (proof.training.executed_lines if proof.training is not None else frozenset())
    proof.not_run = lines.not_executed(inspect.getfile(generated_class), run)
    proof.model, proof.head = generated.name, head
    proof.file_sha256 = digest(generated.file)
    proof.upstream_version = generated.upstream_version
    return proof


def prove_classes(
    upstream_class: type[PreTrainedModel],
    generated_class: type[PreTrainedModel],
    *,
    variants: Iterable[str] | None = None,
    implementations: Collection[str] | None = None,
) -> Proof:
    """The proof of a class against any other, without the names, hashes and lines of a record; the rest as `verify_model`."""
    given = GivenConfig()
    selected = tuple(variants) if variants is not None else _variants(upstream_class, given)
    return _over_variants((upstream_class, generated_class), given, selected, implementations, training_path=True)


def _over_variants(
    pair: tuple[type[PreTrainedModel], type[PreTrainedModel]],
    given: GivenConfig,
    selected: Iterable[str],
    implementations: Collection[str] | None,
    training_path: bool,
) -> Proof:
    """One proof of the variants of a config, and of the training path if they are equal."""
    upstream_class, generated_class = pair
    config_class, kind = config_class_of(upstream_class), head_kinds.kind_of(upstream_class.__name__)
    proofs: list[Proof] = []
    covered_inputs: set[str] = set()
    training_configs: dict[str, PreTrainedConfig] = {}
    refused: dict[str, str] = {}
    for variant in selected:
        try:
            small = given.small_config(config_class, variant=variant if variant in VARIANTS else BASE)
            head_kinds.with_special_tokens(small.config, kind)
        except SmallConfigError as error:
            if variant in (BASE, CHECKPOINTING, EVALUATION):
                raise
            refused[variant] = error.reason
            continue
        proof = _proof_of(pair, small, variant, covered_inputs, is_first=not proofs, implementations=implementations)
        proofs.append(proof)
        if variant in VARIANTS_ON_TRAINING_PATH:
            training_configs[variant] = small.config
    merged = merge(proofs)
    merged.refused_variants = refused
    merged.not_compared = merged.not_compared | _without_example(upstream_class, covered_inputs)
    merged.inputs = tuple(sorted(covered_inputs))
    if training_path and merged.is_equal:
        merged.training = _training_path(upstream_class, generated_class, training_configs)
    return merged


def _proof_of(
    pair: tuple[type[PreTrainedModel], type[PreTrainedModel]],
    small: SmallConfig,
    variant: str,
    covered_inputs: set[str],
    *,
    is_first: bool,
    implementations: Collection[str] | None,
) -> Proof:
    """The proof of one variant; seams are proven in the first only. Adds the names of its input tensors to `covered_inputs`."""
    takes_all = is_first or variant in VARIANTS_WITH_ALL_CASES
    cases, media = _cases(pair[0], small.config, variant, takes_all=takes_all, callers=is_first)
    proof = prove(
        *pair,
        small.config,
        cases,
        variant=variant,
        gradient_checkpointing=variant == CHECKPOINTING,
        training=variant != EVALUATION,
        implementations=implementations if is_first else (),
        round_trip=is_first or variant in ("tied", "untied"),
        extremes=is_first,
    )
    compared = [case.batch for case in cases if case.name not in proof.left_out]
    covered_inputs.update(name for batch in compared for name, value in batch.items() if isinstance(value, Tensor))
    proof.overrides, proof.unclassified = small.overrides, small.unclassified
    proof.refused_inputs, proof.not_compared = media.refused, media.missing
    return proof


def _require_class(head: str, generated: registry.GeneratedModel) -> str:
    if head not in generated.classes:
        raise registry.UnknownModelError(
            f"The generated model '{generated.name}' has no class '{head}'. Heads: {', '.join(generated.heads)}; "
            f"other classes: {', '.join(sorted(set(generated.classes) - set(generated.heads)))}."
        )
    return head


def _cases(
    upstream_class: type[PreTrainedModel], config: PreTrainedConfig, variant: str, *, takes_all: bool, callers: bool
) -> tuple[tuple[Case, ...], MediaCases]:
    """The cases of a variant: all text cases or the first, those of other callers, and media."""
    texts = text_cases(config, upstream_class)
    cases: Sequence[Case] = texts if takes_all else texts[:1]
    if callers:
        cases = (*cases, *caller_cases(config, upstream_class))
    media = MediaCases()
    if takes_media(upstream_class):
        model = build_model(upstream_class, config).train(variant != EVALUATION)
        media = media_cases(model)
        if media.cases:  # then text that upstream refuses may be left out
            cases, refusal = without_media(model, cases)
            media.refused.update({TEXT_ALONE: refusal} if refusal else {})
    return (*cases, *media.cases), media


def _without_example(upstream_class: type, covered_inputs: Collection[str]) -> dict[str, str]:
    """The inputs that a model's class declares and no case contains."""
    reason = "its entry in the class's input_rules has no usable example, expected e.g. {'of': 'image', 'shape': [2]}"
    return {name: reason for name in getattr(upstream_class, "input_rules", {}) if name not in covered_inputs}


def judge(
    model: Subject, *, head: str | None, implementations: Collection[str] | None = None
) -> tuple[verdict.Verdict, Proof | None]:
    """The verdict on a model with all its variants, and its proof; None if a class or its small config raised."""
    try:
        proof = verify_model(model, head=head, implementations=implementations)
    except SmallConfigError as refusal:
        return verdict.Verdict(verdict.GENERATED, verdict.one_line(f"no small config is known: {refusal}")), None
    except UPSTREAM_REFUSALS as refusal:
        reraise_machine_failure(refusal)
        upstream_error = _upstream_error(find_generated(model), head)
        error, prefix = (upstream_error, "upstream's own class fails") if upstream_error else (refusal, "not compared")
        reason = verdict.one_line(f"{prefix}: {type(error).__name__}: {error}")
        return verdict.Verdict(verdict.GENERATED, reason), None
    return verdict.of(proof), proof


def _upstream_error(generated: registry.GeneratedModel, head: str | None) -> Exception | None:
    """What upstream's class alone raises on a small config or on the cases of its proof, if it does."""
    try:
        upstream_class = getattr(generated.upstream(), head or generated.heads[0])
        kind = head_kinds.kind_of(upstream_class.__name__)
        given = given_config.read(generated.directory)
        config = head_kinds.with_special_tokens(given.small_config(upstream_class.config_class).config, kind)
        model = build_model(upstream_class, config)
        media = media_cases(model).cases if takes_media(upstream_class) else ()
        texts = text_cases(config, upstream_class)
        for case in (*(without_media(model, texts)[0] if media else texts), *media):
            step = train_step(model, case)
            if "labels" in case.batch and "loss" not in step.outputs:
                return ValueError("it takes labels and returns no loss, so it cannot be trained.")
    except UPSTREAM_REFUSALS as refusal:
        reraise_machine_failure(refusal)
        return refusal
    return None


def _training_path(
    upstream_class: type, generated_class: type, configs: Mapping[str, PreTrainedConfig]
) -> TrainingPath | None:
    """The comparison of the training path, over variants, with media for the base variant; None if there are none."""
    paths = {
        variant: prove_training_path(upstream_class, generated_class, config, media=variant == BASE)
        for variant, config in configs.items()
    }
    return merge_paths(paths) if paths else None


def _variants(upstream_class: type, given: GivenConfig) -> tuple[str, ...]:
    if head_kinds.kind_of(upstream_class.__name__) is not None:
        return (BASE,)  # the others concern the base model, which the proof of its language model covers
    base = given.small_config(upstream_class.config_class).config
    variants = applicable_variants(base)
    if given.exact:  # which may hold what a variant would change
        same = base.to_dict()
        others = [one for one in variants[1:] if given.small_config(type(base), variant=one).config.to_dict() != same]
        variants = (BASE, *others)
    if upstream_class.supports_gradient_checkpointing:
        variants = (*variants, CHECKPOINTING)
    return (*variants, EVALUATION) if takes_media(upstream_class) else variants
