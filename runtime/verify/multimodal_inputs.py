"""Batches with images, videos and audio for any fusion model, made from its config.

Upstream's own class is the oracle for what a config does not say: how many placeholder tokens an item takes (the rows
that `get_<modality>_features` returns for it), which id marks them, and whether a video is one run of placeholders or
one per frame. Nothing here names a model.

    images   samples with several images of different grids, and one without        batch of 3, padded
    video    clips of several frames                                                batch of 2
    audio    clips of different lengths                                             batch of 2
    sound    videos that bring their audio, both interleaved (models that take `use_audio_in_video`)
    mixed    images, videos, audio and text only, each in samples of their own      what the model takes of it
    packed media   the last of these in one row, with four rows of position ids: the text's, time, height, width
    handed in      the last of these with what a collator computes on the host

Shapes: B samples, S tokens of the longest sample, P patches, F frames.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from patchgen.runtime.verify.inputs import Case
from patchgen.runtime.verify.media import REFUSALS, MediaMaker
from patchgen.runtime.verify.media_samples import Sample, SampleBuilder, refusal_in_a_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MediaCases:
    """The cases that upstream's class takes, and why it takes no others."""

    cases: tuple[Case, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """The modalities that the forward takes and that no case holds, with the reason."""


def takes_media(model_class: type) -> bool:
    """Whether the forward of a class takes images, videos or audio."""
    return bool(MediaMaker.taken_by(model_class))


def media_cases(model: PreTrainedModel, *, seed: int = 0) -> MediaCases:
    """The multimodal cases of a model.

    Args:
        model: upstream's head, built from the small config; it is asked, in evaluation mode and without gradients.
        seed: of pixels, sounds and text.

    Returns:
        Cases with `input_ids`, `labels` and `attention_mask` int64 `[B, S]`, the media as the model wants them, and
        `mm_token_type_ids` or `token_type_ids` where the forward takes them. An input that upstream itself refuses is
        in `refused` with upstream's reason.
    """
    builder = SampleBuilder(model, seed=seed)
    cases: list[Case] = []
    refused = dict(builder.refused)
    accepted: tuple[Sample, ...] = ()
    for name, samples in builder.batches():
        try:
            case = builder.case(name, samples)
            builder.ask(case.batch)
        except REFUSALS as refusal:
            refused[name] = refusal_in_a_line(refusal)
            continue
        cases.append(case)
        accepted = samples
    derived = (builder.packed(cases[-1].batch, accepted), builder.handed_in(cases[-1].batch)) if cases else ()
    for case in derived:
        if case is None:
            continue
        try:
            builder.ask(case.batch)
            cases.append(case)
        except REFUSALS as refusal:
            refused[case.name] = refusal_in_a_line(refusal)
    return MediaCases(tuple(cases), refused, _missing(type(model), cases, refused, builder.not_implemented))


def _missing(
    model_class: type, cases: Iterable[Case], refused: Mapping[str, str], not_implemented: Collection[str]
) -> dict[str, str]:
    """Why modalities that the forward takes are in no case, but for those that upstream itself says it does not serve."""
    held = {name for case in cases for name in case.batch}
    found = {}
    for kind, name in MediaMaker.taken_by(model_class).items():
        if name in held or kind in not_implemented:
            continue
        batches = (kind, f"{kind}s", "mixed")
        unmade = f"no input is made for the argument {name} of {model_class.__name__}.forward"
        found[kind] = next((refused[batch] for batch in batches if batch in refused), unmade)
    return found


def without_media(model: PreTrainedModel, cases: Sequence[Case]) -> tuple[Sequence[Case], str]:
    """The cases of text alone, and why there are none of a model that refuses them all, in upstream's own words."""
    refusal = ""
    for case in cases:
        try:
            with torch.no_grad():
                model(**case.batch, use_cache=False)
        except REFUSALS as error:
            refusal = refusal or refusal_in_a_line(error)
        else:
            return cases, ""
    return (), refusal
