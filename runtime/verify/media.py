"""Images, videos and audio as a model's forward takes them, small and random, from its config.

| layout | used if | tensors |
| --- | --- | --- |
| packed patches | the forward takes `image_grid_thw` | `pixel_values [P, C * T * p * p]` or `[P, C, p, p]`, grids `[N, 3]` |
| patches side by side | the forward takes `target_sizes` | `pixel_values [1, C, p, P * p]`, sizes `[N, 2]` in patches |
| unpacked images | otherwise | `pixel_values [N, C, H, W]` or `[N, crops, C, H, W]`, `image_sizes [N, 2]` where needed |
| spectrograms | the forward takes `input_features` | `input_features [N, mel, F]`, `feature_attention_mask [N, F]` |
| waveforms | it takes `input_values` | `input_values [N, samples]` or `[N, 1, samples]`, a mask of samples |

N items   P patches of p x p pixels and T frames   C channels   H, W height and width in pixels   mel bins   F frames
A forward may take `image_grid_hw` instead of `image_grid_thw`: grids `[N, 2]`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchgen.runtime import media_sizes
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.media_sizes import AUDIO, IMAGE, VIDEO
from patchgen.runtime.minimal_media import (
    CHANNELS,
    GRIDS,
    REFUSALS,
    WAVEFORM,
    candidates,
    extra_image_inputs,
    fixed_frames,
    image_layouts,
)
from patchgen.runtime.parallel.batch_fields import CONCATENATED_PATCHES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VIDEO_WITH_AUDIO = "sound"
"""The kind of a video with its audio."""
FLAT_PATCHES, CROPS, SOUND_FRAMES = "flattened_patches", "image_pixel_values", "audio_input_features"
INPUTS = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos", AUDIO: "input_features"}
"""The argument of each modality."""
OTHER_INPUTS = {
    IMAGE: ("pixel_values_images", CROPS, FLAT_PATCHES),
    AUDIO: (WAVEFORM, "audio_values", "audio_input_ids", "input_audio_embeds", SOUND_FRAMES),
}
"""Other arguments of a modality; only some of them can be made here."""

# Time, height and width in merged tokens: a model that merges n x n patches gets n times as many patches per side.
IMAGE_GRIDS = ((1, 2, 3), (1, 1, 2), (1, 3, 2))
VIDEO_GRIDS = ((2, 1, 2), (3, 2, 1))
AUDIO_FRAMES = (20, 230, 75)
MERGE_OF_ITEM = 2
"""Patches that are merged in each direction, if the item itself says how many."""
AUDIO_TOKENS = (3, 7, 5)
"""Of waveforms."""
SECONDS_PER_GRID = (1.0, 0.5)
AUDIO_MASKS = ("feature_attention_mask", "input_features_mask")


@dataclass(frozen=True)
class Item:
    """One image, video or sound: the forward's arguments for it alone; `parts` if it is a video with its audio."""

    kind: str
    arguments: dict[str, Tensor]
    frames: int = 1
    parts: tuple[Item, ...] = ()
    is_part: bool = False
    """Whether it is part of a video with its audio."""


class MediaMaker:
    """Makes items for one model; the model itself says how many tokens each takes."""

    def __init__(self, model: PreTrainedModel, generator: torch.Generator) -> None:
        self.model = model
        self.config = model.config
        self.generator = generator
        self.forward_parameters = set(inspect.signature(type(model).forward).parameters)
        self._counts: dict[tuple, int] = {}
        self._frames: dict[int, int] | None = None
        self._form: tuple[tuple[int, ...], bool] | None = None
        self._patch: tuple[int, ...] | None = None
        self._candidates: dict[str, dict[str, Tensor]] = {}

    @staticmethod
    def modalities_of(model_class: type) -> tuple[str, ...]:
        """The modalities that the forward of a class takes and that can be made here."""
        parameters = inspect.signature(model_class.forward).parameters
        names = {IMAGE: (CROPS, FLAT_PATCHES), AUDIO: (WAVEFORM, SOUND_FRAMES)}
        return tuple(kind for kind, argument in INPUTS.items() if {argument, *names.get(kind, ())} & parameters.keys())

    @staticmethod
    def media_arguments(model_class: type) -> dict[str, str]:
        """Every modality that the forward of a class takes, with the name of the argument."""
        parameters = inspect.signature(model_class.forward).parameters
        names = {kind: (INPUTS[kind], *OTHER_INPUTS.get(kind, ())) for kind in INPUTS}
        argument_of = {
            kind: next((name for name in arguments if name in parameters), None) for kind, arguments in names.items()
        }
        return {kind: name for kind, name in argument_of.items() if name is not None}

    def item(self, kind: str, number: int) -> Item:
        """An item of a modality; different numbers have different sizes."""
        item = {IMAGE: self._image, VIDEO: self._video, AUDIO: self._audio}[kind](number)
        return replace(item, arguments=item.arguments | self._declared_inputs(kind))

    def _declared_inputs(self, kind: str) -> dict[str, Tensor]:
        """The inputs of a modality that the model's class declares with an example: a row of numbers per item."""
        return {
            name: self._noise(1, *rule["example"]["shape"])
            for name, rule in getattr(type(self.model), "input_rules", {}).items()
            if rule.get("example", {}).get("of") == kind
        }

    def video_with_audio(self, number: int) -> Item:
        """A video with its audio."""
        return join_video_and_audio(self.item(VIDEO, number), self.item(AUDIO, number))

    def count(self, item: Item) -> int:
        """The number of placeholder tokens of an item: the rows of features that upstream computes for it.

        Raises:
            AttributeError: the model has no `get_<modality>_features`.
        """
        key = (item.kind, *(tuple(tensor.shape) for tensor in item.arguments.values()), item.frames)
        key += tuple(str(t.tolist()) for name, t in item.arguments.items() if name.endswith((*GRIDS, "mask", "sizes")))
        if key not in self._counts:
            self._counts[key] = self._count_features(item)
        return self._counts[key]

    def _count_features(self, item: Item) -> int:
        method = self._features(item.kind)
        parameters = set(self._parameters(item.kind))
        arguments = {name: value for name, value in item.arguments.items() if name in parameters or not parameters}
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                output = method(**arguments)
        finally:
            self.model.train(training)
        width = self.config.get_text_config(decoder=True).hidden_size
        return sum(tensor.numel() for tensor in _tensors(features_of(output))) // width

    def has_features(self, kind: str) -> bool:
        """Whether a method of the model computes the features of a modality."""
        return any(hasattr(module, f"get_{kind}_features") for module in (self.model, *self.model.children()))

    def _features(self, kind: str) -> Callable[..., Any]:
        """The method of the model or of its inner model that computes features of a modality."""
        name = f"get_{kind}_features"
        models = (self.model, *self.model.children())
        owner = next((model for model in models if _names_arguments(model, name)), None)
        owner = owner or next((model for model in models if hasattr(model, name)), self.model)
        return getattr(owner, name)

    def _parameters(self, kind: str) -> dict[str, inspect.Parameter]:
        """The named parameters of the method; if it forwards `**kwargs`, also those of the inner model's method."""
        name = f"get_{kind}_features"
        parameters = dict(inspect.signature(self._features(kind)).parameters)
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            inner = [getattr(model, name) for model in self.model.children() if hasattr(model, name)]
            # The inner model's parameters win: what it requires is required even if the head has a default.
            parameters |= {n: p for method in inner for n, p in inspect.signature(method).parameters.items()}
        return {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    # ------------------------------------------------------------------------------------------------ vision

    def _image(self, number: int) -> Item:
        if self.forward_parameters & {f"{IMAGE}_{grid}" for grid in GRIDS}:
            return self.patches(IMAGE, IMAGE_GRIDS[number])
        if CONCATENATED_PATCHES[INPUTS[IMAGE]] in self.forward_parameters:
            return self.side_by_side(IMAGE, IMAGE_GRIDS[number])
        if FLAT_PATCHES in self.forward_parameters:
            return self._flat_patches()
        if not self.has_features(IMAGE):
            return self._plain_image()
        if self._form is None and IMAGE not in self._candidates:
            try:
                self._form = self._accepted_form()
            except REFUSALS as refusal:
                reraise_machine_failure(refusal)
                self._candidates[IMAGE] = self._accepted_candidate(IMAGE, refusal)
        return self._unpacked_image(*self._form) if self._form is not None else self._candidate(IMAGE)

    def _plain_image(self) -> Item:
        """An image for a model without `get_image_features`."""
        vision = media_sizes.tower_config(self.config, IMAGE)
        image = media_sizes.channels(vision), *media_sizes.image_size(vision)
        if CROPS in self.forward_parameters:  # the full image, and one crop of it
            sides = [length // vision.patch_size for length in image[1:]]
            extra = {"image_sizes": torch.tensor([image[1:]]), "image_attention_mask": torch.ones(1, 2, *sides)}
            return Item(IMAGE, {CROPS: self._noise(1, 2, *image), **extra})
        if "aspect_ratio_ids" not in self.forward_parameters:
            # A dimension of images per row.
            per_row = (1,) if "image_attention_mask" in self.forward_parameters else ()
            return Item(IMAGE, {INPUTS[IMAGE]: self._noise(1, *per_row, *image)})
        tiles = vision.max_num_tiles
        extra = {"aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long), "aspect_ratio_mask": torch.ones(1, 1, tiles)}
        return Item(IMAGE, {INPUTS[IMAGE]: self._noise(1, 1, tiles, *image), **extra})

    def _flat_patches(self) -> Item:
        """An image as a row of patches, each preceded by its row and column, counted from 1."""
        vision = media_sizes.tower_config(self.config, IMAGE)
        places = torch.cartesian_prod(torch.arange(1, 3), torch.arange(1, 4)).float()
        patches = torch.cat([places, self._noise(len(places), vision.patch_embed_hidden_size)], dim=1)
        return Item(IMAGE, {FLAT_PATCHES: patches[None]})

    def _candidate(self, kind: str) -> Item:
        """An item of the accepted candidate form, with new random values."""
        (first, values), *others = self._candidates[kind].items()
        return Item(kind, {first: self._noise(*values.shape), **dict(others)})

    def _accepted_candidate(self, kind: str, refusal: Exception) -> dict[str, Tensor]:
        """The first candidate of `minimal_media` that the forward has arguments for and upstream takes.

        Raises:
            Exception: `refusal`, if upstream takes none.
        """
        try:
            for arguments in candidates(self._features(kind), sp=1, like=torch.zeros(1)):
                if arguments.keys() <= self.forward_parameters and self._is_taken(Item(kind, arguments)):
                    return arguments
        except REFUSALS as error:  # the config does not describe such a tower
            reraise_machine_failure(error)
        raise refusal

    def _is_taken(self, item: Item) -> bool:
        try:
            return self.count(item) > 0
        except REFUSALS as error:
            reraise_machine_failure(error)
            return False

    def _unpacked_image(self, dimensions: tuple[int, ...], with_sizes: bool) -> Item:
        vision = media_sizes.tower_config(self.config, IMAGE)
        height, width = media_sizes.image_size(vision)
        arguments = {"pixel_values": self._noise(1, *dimensions, media_sizes.channels(vision), height, width)}
        if with_sizes:
            arguments["image_sizes"] = torch.tensor([[height, width]])
        extra = extra_image_inputs(self.config, self._parameters(IMAGE), dimensions, torch.zeros(()))
        noise = {name: self._noise(*tensor.shape) for name, tensor in extra.items() if tensor.is_floating_point()}
        return Item(IMAGE, arguments | extra | noise)

    def _accepted_form(self) -> tuple[tuple[int, ...], bool]:
        """The form of an unpacked image that upstream takes: `[N, C, H, W]`, or with crops `[N, crops, C, H, W]`."""
        refusal: Exception = TypeError("there is no form of an image to try")
        for dimensions, with_sizes in image_layouts(takes_sizes="image_sizes" in self.forward_parameters):
            try:
                self.count(self._unpacked_image(dimensions, with_sizes))
            except REFUSALS as error:
                reraise_machine_failure(error)
                # Report the first refusal, unless it is a TypeError: a missing argument says little.
                refusal = error if isinstance(refusal, TypeError) else refusal
            else:
                return dimensions, with_sizes
        raise refusal

    def _video(self, number: int) -> Item:
        if "video_grid_thw" in self.forward_parameters:
            grids = VIDEO_GRIDS
            if self._takes_one_frame_only:
                grids = [(1, height, width) for _, height, width in VIDEO_GRIDS]
            return self.with_seconds(self.patches(VIDEO, grids[number]), SECONDS_PER_GRID[number])
        if CONCATENATED_PATCHES[INPUTS[VIDEO]] in self.forward_parameters:
            return self.side_by_side(VIDEO, VIDEO_GRIDS[number])
        if VIDEO in self._candidates:
            return self._candidate(VIDEO)
        image = self._image(0).arguments["pixel_values"]
        frames = VIDEO_GRIDS[0][0]
        item = Item(VIDEO, {"pixel_values_videos": self._noise(1, frames, *image.shape[-3:])}, frames=frames)
        try:
            self.count(item)
        except REFUSALS as refusal:
            reraise_machine_failure(refusal)
            self._candidates[VIDEO] = self._accepted_candidate(VIDEO, refusal)
            return self._candidate(VIDEO)
        return item

    @functools.cached_property
    def _takes_one_frame_only(self) -> bool:
        """Whether upstream takes packed clips of one step in time only."""
        return not self._is_taken(self.patches(VIDEO, (2, 1, 2))) and self._is_taken(self.patches(VIDEO, (1, 1, 2)))

    def with_seconds(self, item: Item, seconds: float) -> Item:
        """Adds the length of a step in time, if the model takes it."""
        for name in ("video_second_per_grid", "second_per_grid_ts"):
            if name in self.forward_parameters:
                item.arguments[name] = torch.tensor([seconds])
        return item

    def patches(self, kind: str, merged: tuple[int, int, int]) -> Item:
        """An image or video of packed patches, with `merged` tokens in time, height and width."""
        if self._patch is None:
            self._patch = self._accepted_patch(kind, merged)
        return self._packed(kind, merged, self._patch)

    def side_by_side(self, kind: str, merged: tuple[int, int, int]) -> Item:
        """An image or video whose patches are concatenated into one wide image, with the size of each frame in patches."""
        vision = media_sizes.tower_config(self.config, kind)
        merge = media_sizes.total_merge(self.config, vision)
        t, h, w = merged[0], merged[1] * merge, merged[2] * merge
        values = self._noise(1, media_sizes.channels(vision), vision.patch_size, vision.patch_size * t * h * w)
        name = INPUTS[kind]
        return Item(kind, {name: values, CONCATENATED_PATCHES[name]: torch.tensor([[h, w]] * t)}, frames=t)

    def _packed(self, kind: str, merged: tuple[int, int, int], patch: tuple[int, ...]) -> Item:
        vision = media_sizes.tower_config(self.config, kind)
        merge = 1 if patch == media_sizes.token_shape(vision) else media_sizes.packed_merge(self.config, vision)
        steps = media_sizes.first_int(vision, "temporal_merge_size", default=1) if kind == VIDEO else 1
        arguments = {}
        if f"{kind}_merge_sizes" in self.forward_parameters:  # given per item instead of by the config
            merge *= MERGE_OF_ITEM
            arguments[f"{kind}_merge_sizes"] = torch.tensor([merge])
        t, h, w = -(-merged[0] // steps) * steps, merged[1] * merge, merged[2] * merge
        name = next(name for grid in GRIDS if (name := f"{kind}_{grid}") in self.forward_parameters)
        row = [h, w] if name.endswith(GRIDS[1]) else [t, h, w]
        arguments |= {INPUTS[kind]: self._noise(t * h * w, *patch), name: torch.tensor([row])}
        return Item(kind, arguments, frames=t)

    def _accepted_patch(self, kind: str, merged: tuple[int, int, int]) -> tuple[int, ...]:
        """The shape of a packed patch that upstream takes; the first candidate if it refuses all."""
        first, *others = media_sizes.patch_shapes(media_sizes.tower_config(self.config, kind))
        return next((shape for shape in (first, *others) if self._is_taken(self._packed(kind, merged, shape))), first)

    # ------------------------------------------------------------------------------------------------- audio

    def _audio(self, number: int) -> Item:
        if SOUND_FRAMES in self.forward_parameters:
            return self._sound_with_token_count()
        if INPUTS[AUDIO] not in self.forward_parameters:
            samples = AUDIO_TOKENS[number] * media_sizes.samples_per_token(self.config)
            forms = (self.waveform(samples, channel) for channel in CHANNELS)
            return next((form for form in forms if self._is_taken(form)), None) or self.waveform(samples)
        if self._frames is None and AUDIO not in self._candidates:
            try:
                self._frames = self._accepted_frames()
            except REFUSALS as refusal:
                reraise_machine_failure(refusal)
                self._candidates[AUDIO] = self._accepted_candidate(AUDIO, refusal)
        if self._frames is None:
            return self._candidate(AUDIO)
        return self.spectrogram(self._frames.get(number, AUDIO_FRAMES[number]))

    def _sound_with_token_count(self) -> Item:
        """A sound that comes with its number of tokens."""
        tower = media_sizes.tower_config(self.config, AUDIO)
        frames = self._noise(1, AUDIO_TOKENS[0] * tower.time_reduction, media_sizes.mel_bins(tower))
        return Item(AUDIO, {SOUND_FRAMES: frames, "audio_embed_sizes": torch.tensor([AUDIO_TOKENS[0]])})

    def _accepted_frames(self) -> dict[int, int]:
        """The lengths of sounds if upstream takes a single length only; empty if it takes any."""
        try:
            self.count(self.spectrogram(AUDIO_FRAMES[0]))
        except REFUSALS as error:
            reraise_machine_failure(error)
            fixed = fixed_frames(media_sizes.tower_config(self.config, AUDIO))
            self.count(self.spectrogram(fixed or AUDIO_FRAMES[0]))
            return dict.fromkeys(range(len(AUDIO_FRAMES)), fixed)
        return {}

    def spectrogram(self, frames: int) -> Item:
        tower = media_sizes.tower_config(self.config, AUDIO)
        arguments = {"input_features": self._noise(1, media_sizes.mel_bins(tower), frames)}
        for name in (*AUDIO_MASKS, *self._required(AUDIO, "_mask")):
            if name in self.forward_parameters:
                arguments[name] = torch.ones(1, frames, dtype=torch.long)
        for name in self._required(AUDIO, "lengths") & self.forward_parameters:
            per_frame = media_sizes.first_int(tower, "hop_length", default=1) if "sample" in name else 1
            arguments[name] = torch.tensor([frames * per_frame])
        return Item(AUDIO, arguments)

    def waveform(self, samples: int, channel: tuple[int, ...] = ()) -> Item:
        """A waveform, with a mask of its samples."""
        masks = {name for name in self._parameters(AUDIO) if name.endswith("_mask")} & self.forward_parameters
        mask = torch.ones(1, samples, dtype=torch.long)
        return Item(AUDIO, {WAVEFORM: self._noise(1, *channel, samples), **dict.fromkeys(sorted(masks), mask)})

    def _required(self, kind: str, ending: str) -> set[str]:
        """The arguments that the method of `_features` requires and whose names end in `ending`: masks, or lengths."""
        parameters = self._parameters(kind)
        return {name for name, p in parameters.items() if p.default is p.empty and name.endswith(ending)}

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


def _names_arguments(model: object, method: str) -> bool:
    """Whether a model has the method with named parameters: heads often have `*args, **kwargs` only."""
    function = getattr(model, method, None)
    if function is None:
        return False
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    return bool(kinds - {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})


def join_video_and_audio(video: Item, audio: Item) -> Item:
    """A video with its audio."""
    return Item(VIDEO_WITH_AUDIO, {}, parts=(replace(video, is_part=True), replace(audio, is_part=True)))


def collate_items(items: Iterable[Item]) -> dict[str, Any]:
    """The concatenated arguments of all items; sounds are padded to the longest."""
    tensors_by_name: dict[str, list[Tensor]] = {}
    for item in items:
        for name, tensor in item.arguments.items():
            tensors_by_name.setdefault(name, []).append(tensor)
    return {
        name: torch.cat(
            _same_length(name, tensors), dim=-1 if CONCATENATED_PATCHES.get(name) in tensors_by_name else 0
        )
        for name, tensors in tensors_by_name.items()
    }


def _same_length(name: str, tensors: list[Tensor]) -> list[Tensor]:
    if name not in (INPUTS[AUDIO], WAVEFORM, f"{WAVEFORM}_mask", *AUDIO_MASKS) and not name.endswith("padding_mask"):
        return tensors
    longest = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(tensor, (0, longest - tensor.shape[-1])) for tensor in tensors]


def features_of(output: Any) -> Any:
    """The features in the output of `get_<modality>_features`: `pooler_output`, `last_hidden_state`, what the first decoder layer
    takes, or the output itself."""
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    if (deepstack := getattr(output, "deepstack_features", None)) is not None:  # of the first layer
        return deepstack[0][1]
    return output


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)]
