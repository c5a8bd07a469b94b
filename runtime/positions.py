"""Multimodal positions of one sample, computed where there is no model: in the workers that load the data.

    function = model.get_position_id_func()      # pickles: the class, its config, a few numbers
    function(input_ids, image_grid_thw=grids)    # {"position_ids": [3, S], "rope_deltas": [1]}

Samples stack to `(B, 3, S)`: handed over as `stacked_position_ids`, the generated model and `slice_batch` turn them into
upstream's `(3, B, S)`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from patchgen.runtime import registry
from patchgen.runtime.media_sizes import AUDIO, IMAGE, VIDEO

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PLACEHOLDER_IDS = {IMAGE: -200, VIDEO: -201, AUDIO: -202}
"""What stands for a token of an image, video or sound in the data pipeline, whatever the model's own id is."""
TOKEN_TYPES = {IMAGE: 1, VIDEO: 2, AUDIO: 3}

# Other names of what `get_rope_index` takes, as forwards and processors have it.
_ALIASES = {
    "second_per_grids": ("video_second_per_grid", "second_per_grid_ts"),
    "second_per_grid_ts": ("video_second_per_grid", "second_per_grids"),
    "audio_seqlens": ("audio_feature_lengths",),
}


@dataclass(frozen=True)
class PositionIds:
    """The position function of a model: an instance is picklable and holds no weights.

    Attributes:
        model_class: the class whose `get_rope_index` computes the positions.
        config: its config.
        attributes: what the method reads off the model besides.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[..., PositionIds], tuple]:
        """By the file of the class as well as its name: a generated folder is no package that a worker finds by name."""
        said = getattr(sys.modules[self.model_class.__module__], "__file__", None)
        file = str(Path(said).resolve()) if said else None
        where = (self.model_class.__module__, self.model_class.__qualname__, file)
        return _restored, (*where, self.config, dict(self.attributes))

    def __call__(self, input_ids: Tensor, **sample: Any) -> dict[str, Tensor]:
        """The positions of one sample.

        Args:
            input_ids: `[S]` or `[1, S]`, with the model's own placeholder ids or those of `PLACEHOLDER_IDS`.
            sample: what the model's `get_rope_index` takes, under its names or the forward's: `image_grid_thw [N, 3]`,
                `video_grid_thw [N, 3]`, seconds per grid `[N]`, lengths of sounds `[N]` or `feature_attention_mask`;
                other entries are left aside. `mm_token_type_ids` follow from the ids where they are not given. A video
                brings its audio if `<vision start><audio start>` opens it: decided video by video, whatever
                `use_audio_in_video` says.

        Returns:
            `position_ids` `[3, S]` and `rope_deltas` `[1]`, as `get_rope_index` gives them for a batch of one.
        """
        ids = self._with_own_ids(input_ids.reshape(1, -1))
        given = {name: value for name, value in sample.items() if value is not None}
        if "feature_attention_mask" in given:
            given.setdefault("audio_feature_lengths", given["feature_attention_mask"].sum(-1))
        given.setdefault("mm_token_type_ids", self._token_types(input_ids.reshape(1, -1)))
        given.setdefault("attention_mask", torch.ones_like(ids))
        rope_index: Any = self._detached().get_rope_index
        if "use_audio_in_video" in inspect.signature(rope_index).parameters:
            positions = self._by_sound(rope_index, ids, given)
        else:
            positions, _ = rope_index(**_arguments(rope_index, {"input_ids": ids, **given}))
        deltas = positions.amax(dim=(0, 2)) + 1 - ids.shape[1]
        return {"position_ids": positions[:, 0], "rope_deltas": deltas}

    def _detached(self) -> PreTrainedModel:
        """The model without modules and weights: its methods, its config and the attributes that they read."""
        model = object.__new__(self.model_class)
        vars(model).update(self.attributes, config=self.config)
        return model

    def _own_id(self, kind: str) -> int | None:
        names = (f"{kind}_token_id", f"{kind}_token_index")
        return next((value for name in names if type(value := getattr(self.config, name, None)) is int), None)

    def _with_own_ids(self, ids: Tensor) -> Tensor:
        for kind, placeholder in PLACEHOLDER_IDS.items():
            own = self._own_id(kind)
            if own is not None:
                ids = ids.masked_fill(ids == placeholder, own)
        return ids

    def _token_types(self, ids: Tensor) -> Tensor:
        types = torch.zeros_like(ids)
        for kind, number in TOKEN_TYPES.items():
            types[(ids == PLACEHOLDER_IDS[kind]) | (ids == self._own_id(kind))] = number
        return types

    def _by_sound(self, rope_index: Callable[..., Any], ids: Tensor, given: dict[str, Any]) -> Tensor:
        """Upstream's flag holds for a whole sample, so a sample is cut between videos of either kind.

        Every position counts from the largest before it, so a part's positions start where the last part's ended.
        """
        parts, start = [], 0
        for part in self._parts(ids[0]):
            length = part.stop - part.start
            arguments = {
                **given,
                "input_ids": ids[:, part.start : part.stop],
                "attention_mask": torch.ones(1, length, dtype=ids.dtype, device=ids.device),
                "use_audio_in_video": part.has_sound,
            }
            for name, taken in part.taken.items():
                for key in (name, *_ALIASES.get(name, ())):
                    if key in arguments:
                        arguments[key] = arguments[key][taken] if taken.stop > taken.start else None
            positions, _ = rope_index(**_arguments(rope_index, arguments))
            parts.append(positions + start)
            start = parts[-1].max() + 1
        return torch.cat(parts, dim=2)

    def _parts(self, ids: Tensor) -> Iterator[_Part]:
        """The parts of a sample whose videos all bring their audio, or none does."""
        tokens = ids.tolist()
        vision, audio = self.config.vision_start_token_id, self.config.audio_start_token_id
        part = _Part(0)
        for place, token in enumerate(tokens):
            opens = tokens[place + 1] if place + 1 < len(tokens) else None
            if token == vision and opens in (audio, self._own_id(VIDEO)):
                has_sound = opens == audio
                if part.num_videos and part.has_sound != has_sound:
                    yield part.until(place)
                    part = part.after(place)
                part.has_sound = has_sound
                part.num_videos += 1
            elif token == vision and opens == self._own_id(IMAGE):
                part.num_images += 1
            part.num_audios += token == audio
        yield part.until(len(tokens))


def _restored(module: str, name: str, file: str | None, config: Any, attributes: dict[str, Any]) -> PositionIds:
    """The position function of a class in a module that is imported by name, or else read from its file."""
    if module not in sys.modules and file is not None and module.startswith(registry.LOCAL_PACKAGE):
        registry.import_file(Path(file))
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return PositionIds(found, config, attributes)


@dataclass
class _Part:
    """A part of a sample, and which of its items lie in it."""

    start: int
    stop: int = 0
    first: tuple[int, int, int] = (0, 0, 0)  # images, videos, sounds before it
    num_images: int = 0
    num_videos: int = 0
    num_audios: int = 0
    has_sound: bool = False

    @property
    def taken(self) -> dict[str, slice]:
        images, videos, audios = self.first
        video = slice(videos, videos + self.num_videos)
        return {
            "image_grid_thw": slice(images, images + self.num_images),
            "video_grid_thw": video,
            "second_per_grids": video,
            "audio_seqlens": slice(audios, audios + self.num_audios),
        }

    def until(self, stop: int) -> _Part:
        self.stop = stop
        return self

    def after(self, start: int) -> _Part:
        images, videos, sounds = self.first
        return _Part(start, first=(images + self.num_images, videos + self.num_videos, sounds + self.num_audios))


def _arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a function takes of these, under its own names."""
    found = {}
    for name in inspect.signature(function).parameters:
        key = next((key for key in (name, *_ALIASES.get(name, ())) if given.get(key) is not None), None)
        if key is not None:
            found[name] = given[key]
    return found
