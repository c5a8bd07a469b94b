"""Batches with images, videos and audio for any fusion model, made from its config.

What a config does not say is found by running upstream's own class: how many placeholder tokens an item takes (the rows
that `get_<modality>_features` returns for it), which id marks them, and whether a video is one run of placeholders or
one per frame.

    images   samples with several images of different grids, and one without        batch of 3, padded
    video    clips of several frames                                                batch of 2
    audio    clips of different lengths                                             batch of 2
    sound    videos with their audio, both interleaved (models that take `use_audio_in_video`)
    mixed    a sample per modality that the model takes, one with all of them, and one with text only
    packed media   the last of these in one row, with four rows of position ids: text, time, height, width
    handed in      the last of these with the values that a collator computes on the host

Shapes: B samples, S tokens of the longest sample, P patches, F frames.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.verify import head_kinds
from patchgen.runtime.verify.inputs import Case
from patchgen.runtime.verify.media import REFUSALS, MediaMaker
from patchgen.runtime.verify.media_samples import Sample, SampleBuilder, one_line_refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MediaCases:
    """The cases that upstream's class takes, and why it refused the others."""

    cases: tuple[Case, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """The modalities that the forward takes and no case contains, with the reason."""


def takes_media(model_class: type) -> bool:
    """Whether the forward of a class takes images, videos or audio."""
    return bool(MediaMaker.media_arguments(model_class))


def media_cases(model: PreTrainedModel, *, seed: int = 0) -> MediaCases:
    """The multimodal cases of a model.

    Args:
        model: upstream's head, built from the small config.
        seed: of pixels, sounds and text.

    Returns:
        Cases with `input_ids`, `labels` and (not if packed) `attention_mask` int64 `[B, S]`, the media as the model takes them,
        and `mm_token_type_ids` or `token_type_ids` if the forward takes them. An input that upstream itself refuses is
        in `refused` with upstream's reason.
    """
    builder = SampleBuilder(model, seed=seed, kind=head_kinds.kind_of(type(model).__name__))
    cases: list[Case] = []
    refused = dict(builder.refused)
    accepted: tuple[Sample, ...] = ()
    for name, samples in builder.batches():
        try:
            case = builder.case(name, samples)
            builder.run_upstream(case.batch)
        except REFUSALS as refusal:
            reraise_machine_failure(refusal)
            refused[name] = one_line_refusal(refusal)
            continue
        cases.append(case)
        accepted = samples
    derived = (builder.packed(cases[-1].batch, accepted), builder.with_host_values(cases[-1].batch)) if cases else ()
    for case in derived:
        if case is None:
            continue
        try:
            builder.run_upstream(case.batch)
            cases.append(case)
        except REFUSALS as refusal:
            reraise_machine_failure(refusal)
            refused[case.name] = one_line_refusal(refusal)
    return MediaCases(tuple(cases), refused, _missing(type(model), cases, refused, builder.not_implemented))


def _missing(
    model_class: type, cases: Iterable[Case], refused: Mapping[str, str], not_implemented: Collection[str]
) -> dict[str, str]:
    """Why modalities that the forward takes are in no case, except those that upstream does not implement."""
    covered = {name for case in cases for name in case.batch}
    reasons = {}
    for kind, name in MediaMaker.media_arguments(model_class).items():
        if name in covered or kind in not_implemented:
            continue
        batches = (kind, f"{kind}s", "mixed")
        default = f"no input is made for the argument {name} of {model_class.__name__}.forward"
        reasons[kind] = next((refused[batch] for batch in batches if batch in refused), default)
    return reasons


def without_media(model: PreTrainedModel, cases: Sequence[Case]) -> tuple[Sequence[Case], str]:
    """The text cases, or none and upstream's first error if it refuses them all."""
    refusal = ""
    for case in cases:
        try:
            with torch.no_grad():
                model(**case.batch, use_cache=False)
        except REFUSALS as error:
            reraise_machine_failure(error)
            refusal = refusal or one_line_refusal(error)
        else:
            return cases, ""
    return (), refusal
