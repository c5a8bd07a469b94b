"""The smallest image, video or sound that a model accepts, found by trying candidates.

Configs do not say whether images are passed in full, in crops or as patches, or whether a sound may be short. So candidates
are tried, in the order of their size, on a copy of the model with constant weights: it needs almost no memory, has no hooks,
and runs no collectives. The result depends on the config alone and is the same on all ranks.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.runtime import media_sizes, parallel
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.tensor_cache import TensorCache

# Errors of upstream's classes on inputs they do not support.
REFUSALS = (
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    StopIteration,
    ZeroDivisionError,
)

CROPS = ((), *((crops,) for crops in range(1, 7)))
"""Dimensions before `C, H, W` of an image: none, or a number of crops."""
GRIDS = ("grid_thw", "grid_hw")
"""Name endings of arguments with an image's number of patches in time, height and width, or in the latter two."""
VIDEO_FRAMES = (1, 2, 4, 8)
AUDIO_FRAMES = (16, 100, 400)
"""Some audio towers halve their frames four times."""
WAVEFORM = "input_values"
"""The argument for raw audio samples."""
CHANNELS = ((), (1,))
"""Dimensions before the samples: none, or one channel."""
MEL_BINS = (80, 128, 64, 32)
"""Candidates for towers whose configs have none."""
PATCHED_SIDES = (1, 2, 3, 4, 6, 8, 16)
"""Candidate sides of an image, in patches."""
CONSTANT_WEIGHT = 0.01
"""The value of all weights of the copy; not zero, because some towers divide by the norm of their output."""


def image_layouts(*, takes_sizes: bool) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Layouts of a full image: `[N, C, H, W]` or `[N, crops, C, H, W]`, without and with `image_sizes`."""
    for crops in CROPS:
        yield from ((crops, with_sizes) for with_sizes in ((False, True) if takes_sizes else (False,)))


def extra_image_inputs(config: Any, parameters: Any, crops: tuple[int, ...], like: Tensor) -> dict[str, Tensor]:
    """The inputs that a method needs besides a full image: the image of a second tower, and a mask of crops.

    Args:
        config: of the model; its `<name>_vision_config` describes the image `<name>_pixel_values`.
        parameters: of the method, by name.
        crops: dimensions before `C, H, W`.
        like: gives device and dtype.

    Returns:
        Images of ones `[1, *crops, C, H, W]`, masks of ones `[1, *crops]` bool.
    """
    inputs = {}
    for name, parameter in parameters.items():
        tower = getattr(config, name.replace("pixel_values", "vision_config"), None)
        if name.endswith("_pixel_values") and tower is not None:
            inputs[name] = like.new_ones(1, *crops, media_sizes.channels(tower), *media_sizes.image_size(tower))
        elif name == "pixel_attention_mask" and parameter.default is parameter.empty:
            inputs[name] = torch.ones(1, *crops, dtype=torch.bool, device=like.device)
    return inputs


def fixed_frames(audio: Any) -> int:
    """The number of frames, if the tower takes a single length; 0 if the config has none."""
    return 2 * media_sizes.first_int(audio, "max_source_positions", default=0)


# ----------------------------------------------------------------------------------------------- candidates


def candidates(features: Callable[..., Any], *, sp: int, like: Tensor) -> Iterator[dict[str, Tensor]]:
    """Arguments of a bound `get_<modality>_features` for one small image, video or sound, of zeros or ones.

    Args:
        features: its first parameter is the media tensor, its `__self__` the model.
        sp: ranks that share a sequence; a packed image has a row of merged patches for each.
        like: gives device and dtype.

    Raises:
        ValueError: the model has no config of such a tower.
    """
    kind = kind_of(features.__name__)
    parameters = inspect.signature(features).parameters
    if WAVEFORM in parameters:
        samples = media_sizes.samples_per_token(features.__self__.config)
        return ({WAVEFORM: like.new_zeros(1, *channel, samples)} for channel in CHANNELS)
    tower = media_sizes.tower_config(features.__self__.config, kind)
    return (
        _audio_candidates(tower, parameters, like)
        if kind == media_sizes.AUDIO
        else _image_candidates(features, tower, kind, sp, like)
    )


def kind_of(method: str) -> str:
    """The modality of a `get_<modality>_features`."""
    names = {media_sizes.VIDEO: ("video",), media_sizes.AUDIO: ("audio", "speech")}
    return next(
        (kind for kind, endings in names.items() if any(name in method for name in endings)), media_sizes.IMAGE
    )


def _audio_candidates(tower: Any, parameters: Any, like: Tensor) -> Iterator[dict[str, Tensor]]:
    first, *other_names = parameters
    required = {name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    masks = [
        n
        for n in other_names
        if n.endswith(("attention_mask", "features_mask")) or (n in required and n.endswith("_mask"))
    ]
    lengths = [name for name in other_names if name.endswith(("lengths", "lens", "_sizes"))]
    mel_bins = dict.fromkeys((media_sizes.mel_bins(tower), *MEL_BINS))
    fixed = fixed_frames(tower)
    for frames in (*AUDIO_FRAMES, *([fixed] if fixed else ())):
        shapes = [shape for mel in mel_bins for shape in ((mel, frames), (frames, mel))]
        for shape in shapes:
            for dtype in (torch.bool, torch.long):  # bool first: an integer mask could be used as indices
                arguments = {first: like.new_zeros(1, *shape)}
                arguments |= {name: torch.ones(1, frames, dtype=dtype, device=like.device) for name in masks}
                yield arguments | {
                    name: torch.tensor([frames], device=like.device) for name in lengths if name in required
                }
                if not masks:
                    break


def _image_candidates(
    features: Callable[..., Any], tower: Any, kind: str, sp: int, like: Tensor
) -> Iterator[dict[str, Tensor]]:
    parameters = inspect.signature(features).parameters
    first, *other_names = parameters

    def integers(*rows: list[int]) -> Tensor:
        return torch.tensor(rows, device=like.device)

    grid = next((name for name in other_names if name.endswith(GRIDS)), None)
    if grid is not None:
        merged = media_sizes.packed_merge(features.__self__.config, tower)
        steps = media_sizes.first_int(tower, "temporal_merge_size", default=1) if kind == media_sizes.VIDEO else 1
        sizes = {
            name: torch.tensor([merged], device=like.device) for name in other_names if name.endswith("merge_sizes")
        }
        for shape in media_sizes.patch_shapes(tower):
            merge = 1 if shape == media_sizes.token_shape(tower) else merged
            sides = [merge * sp, merge]
            row = sides if grid.endswith(GRIDS[1]) else [steps, *sides]
            yield {first: like.new_zeros(steps * merge * merge * sp, *shape), grid: integers(row)} | sizes
        return
    target_sizes = next((name for name in other_names if name.startswith("target_sizes")), None)
    if target_sizes is not None:  # patches concatenated along the width
        for side in PATCHED_SIDES:
            patches = like.new_zeros(1, media_sizes.channels(tower), tower.patch_size, tower.patch_size * side * side)
            yield {first: patches, target_sizes: integers([side, side])}
        return
    yield from _patches(tower, kind, parameters, like)
    sides = media_sizes.image_sides(tower)
    for height, width in sides:
        if kind == media_sizes.VIDEO:
            steps = media_sizes.first_int(tower, "video_temporal_patch_size", default=1)
            for leading, frames in itertools.product(
                ((1,), ()), (count for count in VIDEO_FRAMES if count % steps == 0)
            ):
                yield {first: like.new_zeros(*leading, frames, media_sizes.channels(tower), height, width)}
            continue
        for crops, with_sizes in image_layouts(takes_sizes="image_sizes" in other_names):
            # Not zeros: some models drop images of zeros as batch padding.
            arguments = {first: like.new_ones(1, *crops, media_sizes.channels(tower), height, width)}
            arguments |= extra_image_inputs(features.__self__.config, parameters, crops, like)
            yield arguments | ({"image_sizes": integers([height, width])} if with_sizes else {})
    if kind == media_sizes.IMAGE and isinstance(getattr(tower, "patch_size", None), int):
        for side in PATCHED_SIDES:  # patches without positions
            yield {first: like.new_ones(1, side * side, media_sizes.patch_values(tower))}


def _patches(tower: Any, kind: str, parameters: Any, like: Tensor) -> Iterator[dict[str, Tensor]]:
    """Patches of an image `[1, P, C * p * p]` (letters as in `media_sizes.py`) with positions `[1, P, 2]` or a shape `[1, 2]`."""
    first, *other_names = parameters
    position = next((name for name in other_names if name.endswith("position_ids")), None)
    shape = next((name for name in other_names if name.endswith("spatial_shapes")), None)
    if (position is None and shape is None) or not isinstance(getattr(tower, "patch_size", None), int):
        return
    sizes = dict.fromkeys((media_sizes.patch_values(tower), media_sizes.merged_patch_values(tower)))
    for values, side in itertools.product(sizes, PATCHED_SIDES):
        for frames in ((), (1,)) if kind == media_sizes.VIDEO else ((),):
            arguments = {first: like.new_zeros(1, *frames, side * side, values)}
            if position is not None:
                places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).to(like.device)
                arguments[position] = places.view(1, *frames, side * side, 2)
            if shape is not None:
                arguments[shape] = torch.tensor([[side, side]], device=like.device)
            for name in other_names:
                if name.endswith("attention_mask"):
                    arguments[name] = torch.ones(1, side * side, dtype=torch.long, device=like.device)
                elif name.startswith("num_frames"):
                    arguments[name] = torch.ones(1, dtype=torch.long, device=like.device)
            yield arguments


# --------------------------------------------------------------------------------------------- the one chosen

# model -> {(method, ranks): (index of the candidate or None, the errors)}
_CHOSEN: TensorCache[dict[tuple[str, int], tuple[int | None, str]]] = TensorCache(lambda _model: {})


def minimal_inputs(features: Callable[..., Any], *, sp: int, like: Tensor) -> dict[str, Tensor] | None:
    """The first candidate that the model's towers accept and return finite features for; None if there is none."""
    number = _choice(features, sp, like)[0]
    if number is None:
        return None
    return next(itertools.islice(candidates(features, sp=sp, like=like), number, None))


def refusal(features: Callable[..., Any], *, sp: int, like: Tensor) -> str:
    """Why `minimal_inputs` found none: the errors of the first and the last candidate."""
    return _choice(features, sp, like)[1]


def _choice(features: Callable[..., Any], sp: int, like: Tensor) -> tuple[int | None, str]:
    choices = _CHOSEN(features.__self__)
    key = features.__name__, sp
    if key not in choices:
        choices[key] = _search(features, sp, like)
    return choices[key]


@torch.no_grad()
def _search(features: Callable[..., Any], sp: int, like: Tensor) -> tuple[int | None, str]:
    reasons: list[str] = []
    copy = getattr(bare_copy(features.__self__, like), features.__name__)
    with parallel.using(None):
        try:
            for number, arguments in enumerate(candidates(copy, sp=sp, like=like.detach())):
                try:
                    tensors = feature_tensors(copy(**arguments))
                except REFUSALS as error:
                    reraise_machine_failure(error)
                    reasons.append(f"{type(error).__name__}: {error}")
                    continue
                if tensors and all(tensor.numel() and bool(tensor.isfinite().all()) for tensor in tensors):
                    return number, ""
                reasons.append("it returns no features, or some that are not finite")
        except (AttributeError, ValueError) as error:  # the config lacks the size of an image
            reasons.append(str(error) or type(error).__name__)
    reported = [*reasons[:1], *reasons[-1:]] or ["its config gives no size of an input to try"]
    return None, "; ".join(dict.fromkeys(reason.partition("\n")[0][:200] for reason in reported))


def bare_copy(model: nn.Module, like: Tensor) -> nn.Module:
    """A copy of a model with constant weights and the calls of its classes: without hooks, compiled calls and forwards that an
    instance has in place of its class's, which would run the model itself. Its language model is not copied.

    Parameters may be sharded or on another device: only their shapes are read.
    """
    decoder = getattr(model, "language_model", None)
    copies: dict[int, Any] = {id(decoder): decoder}

    def copied(module: nn.Module) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        copy = copies[id(module)] = object.__new__(type(module))
        vars(copy).update(
            {name: value for name, value in vars(module).items() if not _replaces_method(module, value, name)}
        )
        for name, value in vars(module).items():
            if name.endswith("_hooks") or "_hooks_" in name:
                vars(copy)[name] = type(value)() if value is not None else None
        vars(copy)["_parameters"] = {
            name: p if p is None else nn.Parameter(_constant_weight(p.shape, like), requires_grad=False)
            for name, p in module._parameters.items()
        }
        vars(copy)["_buffers"] = {name: b if b is None else b.to(like.device) for name, b in module._buffers.items()}
        vars(copy)["_modules"] = {name: m if m is None else copied(m) for name, m in module._modules.items()}
        copy.training = False
        return copy

    return copied(model)


def _replaces_method(module: nn.Module, value: object, name: str) -> bool:
    return callable(value) and not isinstance(value, nn.Module) and hasattr(type(module), name)


def _constant_weight(shape: torch.Size, like: Tensor) -> Tensor:
    """An expanded scalar; for stacked experts an expanded matrix, since grouped products need its strides."""
    allocated = shape[-2:] if len(shape) == 3 else ()
    return torch.full(allocated, CONSTANT_WEIGHT, device=like.device, dtype=like.dtype).expand(shape)


def feature_tensors(output: Any) -> list[Tensor]:
    """The tensors that a model scatters or adds: `pooler_output` and deepstack features; else the last hidden state."""
    values = [getattr(output, name, None) for name in ("pooler_output", "deepstack_features")]
    if all(value is None for value in values):
        values = [getattr(output, "last_hidden_state", output)]
    return [tensor for value in values for tensor in _tensors(value)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value or () for tensor in _tensors(part)] if isinstance(value, list | tuple) else []
