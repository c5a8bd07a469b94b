"""Multimodal positions of one sample, computed without a model: in the data workers.

    function = model.get_position_id_func()      # pickles: the class, its config, a few numbers
    function(input_ids, image_grid_thw=grids)    # {"position_ids": [3, S], "rope_deltas": [1]}

Samples stack to `(B, 3, S)`: passed as `stacked_position_ids`, the generated model and `slice_batch` convert them to upstream's
`(3, B, S)`.
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
"""Placeholder ids of image, video and audio tokens in the data pipeline, independent of the model's ids."""
TOKEN_TYPES = {IMAGE: 1, VIDEO: 2, AUDIO: 3}

COMPUTE = "compute_3d_position_ids"
"""Upstream's name for the method by which a forward computes the positions that it was not given."""

# Other names of `get_rope_index`'s arguments, in forwards and processors.
_ALIASES = {
    "second_per_grids": ("video_second_per_grid", "second_per_grid_ts"),
    "second_per_grid_ts": ("video_second_per_grid", "second_per_grids"),
    "audio_seqlens": ("audio_feature_lengths",),
}


@dataclass(frozen=True)
class PositionIds:
    """The position function of a model; picklable, without weights.

    Attributes:
        model_class: the class whose `get_rope_index` computes the positions.
        config: its config.
        attributes: other attributes of the model that the method reads.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[..., PositionIds], tuple]:
        """Pickles the file of the class with its name: workers cannot import a generated folder by name."""
        path = getattr(sys.modules[self.model_class.__module__], "__file__", None)
        file = str(Path(path).resolve()) if path else None
        location = (self.model_class.__module__, self.model_class.__qualname__, file)
        return _unpickle, (*location, self.config, dict(self.attributes))

    def __call__(self, input_ids: Tensor, **sample: Any) -> dict[str, Tensor]:
        """The positions of one sample.

        Args:
            input_ids: `[S]` or `[1, S]`, with the model's own placeholder ids or those of `PLACEHOLDER_IDS`.
            sample: arguments of the model's `get_rope_index`, by its names or the forward's: `image_grid_thw [N, 3]`,
                `video_grid_thw [N, 3]`, seconds per grid `[N]`, lengths of sounds `[N]` or `feature_attention_mask`;
                other entries are ignored. `mm_token_type_ids` default to the types of the ids. A video includes its
                audio if it starts with `<vision start><audio start>`: decided for each video, ignoring
                `use_audio_in_video`.

        Returns:
            `position_ids` `[3, S]` and `rope_deltas` `[1]`, as `get_rope_index` returns them for a batch of one.
        """
        ids = self._with_model_ids(input_ids.reshape(1, -1))
        inputs = {name: value for name, value in sample.items() if value is not None}
        if "feature_attention_mask" in inputs:
            inputs.setdefault("audio_feature_lengths", inputs["feature_attention_mask"].sum(-1))
        inputs.setdefault("mm_token_type_ids", self._token_types(input_ids.reshape(1, -1)))
        inputs.setdefault("attention_mask", torch.ones_like(ids))
        rope_index: Any = self._without_modules().get_rope_index
        if "use_audio_in_video" in inspect.signature(rope_index).parameters:
            positions = self._with_audio_by_video(rope_index, ids, inputs)
        else:
            positions, _ = rope_index(**_arguments(rope_index, {"input_ids": ids, **inputs}))
        deltas = positions.amax(dim=(0, 2)) + 1 - ids.shape[1]
        return {"position_ids": positions[:, 0], "rope_deltas": deltas}

    def of_batch(self, batch: Mapping[str, Any]) -> Tensor | None:
        """What upstream's forward computes for a batch without position ids; None: it counts 0, 1, 2 ... in each row.

        Args:
            batch: full rows, by the forward's names: `input_ids` `(B, S)`, `attention_mask` `(B, S)`, `mm_token_type_ids`
                `(B, S)`, grids `(N, 3)`, ...

        Returns:
            `(rows, B, S)`, on the device of `input_ids`.

        Raises:
            ValueError: upstream's own, if it lacks an input for them.
        """
        inputs = {"input_ids": None, **batch}
        if (mask := inputs.get("feature_attention_mask")) is not None:  # as the forwards that take it do
            inputs["audio_feature_lengths"] = mask.sum(-1)
        model: Any = self._without_modules()
        vars(model)["rope_deltas"] = None  # what generation keeps
        method = getattr(model, COMPUTE, None)
        if method is None:
            return model.get_rope_index(**_arguments(model.get_rope_index, inputs))[0]
        absent = {
            name: None
            for name, parameter in inspect.signature(method).parameters.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        return method(**absent | _arguments(method, inputs))

    def _without_modules(self) -> PreTrainedModel:
        """The model without modules and weights: only its methods, its config and the attributes that they read."""
        model = object.__new__(self.model_class)
        vars(model).update(self.attributes, config=self.config)
        return model

    def _model_id(self, kind: str) -> int | None:
        names = (f"{kind}_token_id", f"{kind}_token_index")
        return next((value for name in names if type(value := getattr(self.config, name, None)) is int), None)

    def _with_model_ids(self, ids: Tensor) -> Tensor:
        for kind, placeholder in PLACEHOLDER_IDS.items():
            token_id = self._model_id(kind)
            if token_id is not None:
                ids = ids.masked_fill(ids == placeholder, token_id)
        return ids

    def _token_types(self, ids: Tensor) -> Tensor:
        types = torch.zeros_like(ids)
        for kind, number in TOKEN_TYPES.items():
            types[(ids == PLACEHOLDER_IDS[kind]) | (ids == self._model_id(kind))] = number
        return types

    def _with_audio_by_video(self, rope_index: Callable[..., Any], ids: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Upstream's flag applies to a full sample, so a sample is split between videos with and without audio.

        Positions continue from the largest one before, so those of a part start after the previous part's.
        """
        parts, start = [], 0
        for part in self._parts(ids[0]):
            length = part.stop - part.start
            arguments = {
                **inputs,
                "input_ids": ids[:, part.start : part.stop],
                "attention_mask": torch.ones(1, length, dtype=ids.dtype, device=ids.device),
                "use_audio_in_video": part.has_audio,
            }
            for name, items in part.items.items():
                for key in (name, *_ALIASES.get(name, ())):
                    if key in arguments:
                        arguments[key] = arguments[key][items] if items.stop > items.start else None
            positions, _ = rope_index(**_arguments(rope_index, arguments))
            parts.append(positions + start)
            start = parts[-1].max() + 1
        return torch.cat(parts, dim=2)

    def _parts(self, ids: Tensor) -> Iterator[_Part]:
        """Splits a sample into parts whose videos all have audio, or none has."""
        tokens = ids.tolist()
        vision, audio = self.config.vision_start_token_id, self.config.audio_start_token_id
        part = _Part(0)
        for index, token in enumerate(tokens):
            following = tokens[index + 1] if index + 1 < len(tokens) else None
            if token == vision and following in (audio, self._model_id(VIDEO)):
                has_audio = following == audio
                if part.num_videos and part.has_audio != has_audio:
                    yield part.until(index)
                    part = part.after(index)
                part.has_audio = has_audio
                part.num_videos += 1
            elif token == vision and following == self._model_id(IMAGE):
                part.num_images += 1
            part.num_audios += token == audio
        yield part.until(len(tokens))


def _unpickle(module: str, name: str, file: str | None, config: Any, attributes: dict[str, Any]) -> PositionIds:
    """The position function of a class whose module is imported by name, or from its file."""
    if module not in sys.modules and file is not None and module.startswith(registry.LOCAL_PACKAGE):
        registry.import_file(Path(file))
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    return PositionIds(function, config, attributes)


@dataclass
class _Part:
    """A part of a sample, and the images, videos and sounds in it."""

    start: int
    stop: int = 0
    first: tuple[int, int, int] = (0, 0, 0)  # images, videos, sounds before it
    num_images: int = 0
    num_videos: int = 0
    num_audios: int = 0
    has_audio: bool = False

    @property
    def items(self) -> dict[str, slice]:
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


def _arguments(function: Callable[..., Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes, by its own names."""
    arguments = {}
    for name in inspect.signature(function).parameters:
        key = next((key for key in (name, *_ALIASES.get(name, ())) if inputs.get(key) is not None), None)
        if key is not None:
            arguments[name] = inputs[key]
    return arguments
