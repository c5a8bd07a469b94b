"""Every rank runs every tower, whatever its batch holds.

FSDP gathers a tower's weights when the tower runs, on all ranks or on none. A rank without an image therefore runs the
vision tower on a minimal one, whose features enter as `0 * mean`: nothing changes but that the collectives happen and
every parameter has a gradient, zero.

    rank 0   images and videos    one pass over both together
    rank 1   videos only          one pass
    rank 2   text only            one pass over a minimal image, times zero

The pass stands where the real one would stand, so that towers run in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from patchgen.runtime import minimal_media
from patchgen.runtime.parallel import checkpointing, collectives, unused
from patchgen.runtime.parallel.checkpointing import CHECKPOINT
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.tensor_cache import longest

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "real_tokens", "stacked_position_ids")
"""What says where the documents of a packed text end, which of its tokens are padding, and where its tokens stand."""


def without_packing(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """See `ops.tower_kwargs`."""
    return {name: value for name, value in kwargs.items() if name not in PACKING}


def max_seqlen(cu_seqlens: Tensor, kwargs: dict[str, Any] | None) -> int:
    """See `ops.max_seqlen`."""
    known = kwargs.pop("max_seqlen", None) if kwargs is not None else None
    if known is not None:
        return known
    return longest(cu_seqlens)


def absent_tower(
    inputs_embeds: Tensor,
    inputs: object,
    features: Callable[..., Any],
    state: ParallelState | None,
) -> Tensor:
    """See `ops.absent_tower`."""
    if state is None or state.config.num_batches == 1:  # with several, ranks may hold different modalities
        return inputs_embeds
    # Ranks with inputs ask as well: what no rank can do without is found in the first forward, on all of them.
    minimal = minimal_media.minimal_inputs(features, sp=state.sp, like=inputs_embeds)
    if minimal is None:
        _require_everywhere(inputs, features, inputs_embeds, state)
    if inputs is not None or minimal is None:
        return inputs_embeds
    with _same_statistics(features.__self__):
        values = minimal_media.feature_tensors(features(**minimal))
    nothing = torch.stack([value.float().mean() for value in values]).sum() * 0.0
    unused.stands_in(nothing)
    return inputs_embeds + nothing.to(inputs_embeds.dtype)


@contextlib.contextmanager
def _same_statistics(model: nn.Module) -> Iterator[None]:
    """Within the block batch norms count on copies of their statistics: what they see there is no image of the run.

    What a layer that transformers checkpoints computes again in the backward is none either; a module that calls
    `torch.utils.checkpoint` itself still counts what it computes again.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    layers = {module: getattr(module, CHECKPOINT, None) for module in model.modules()} if norms else {}
    layers = {layer: function for layer, function in layers.items() if function and checkpointing.recomputes(function)}
    for layer, function in layers.items():
        setattr(layer, CHECKPOINT, partial(_checkpoint_on_copies, norms, function))
    try:
        with _copied_statistics(norms):
            yield
    finally:
        for layer, function in layers.items():
            setattr(layer, CHECKPOINT, function)


def _checkpoint_on_copies(
    norms: Sequence[_BatchNorm], function: Callable, layer: Callable, *args: Any, **kwargs: Any
) -> Any:
    """`function(layer, ...)`, each run of the layer on copies of the statistics."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _copied_statistics(norms):
            return layer(*args, **kwargs)

    return function(run, *args, **kwargs)


@contextlib.contextmanager
def _copied_statistics(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    own = [(norm, dict(norm.named_buffers(recurse=False))) for norm in norms]
    for norm, buffers in own:
        norm._buffers.update({name: value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in own:
            norm._buffers.update(buffers)


def _require_everywhere(inputs: object, features: Callable[..., Any], like: Tensor, state: ParallelState) -> None:
    """Raises on all ranks if one of them lacks an input that nothing can stand for. One host sync per forward.

    Raises:
        ValueError: a rank lacks it.
    """
    absent = torch.tensor([inputs is None], dtype=torch.int32, device=like.device)
    lacking = int(collectives.all_reduce(absent, operation="count the ranks without an input of a tower"))
    if lacking:
        kind = minimal_media.kind_of(features.__name__)
        raise ValueError(
            f"No minimal {kind} is known for {type(features.__self__).__name__}; every rank must hold one, and {lacking} "
            f"ranks hold none. Tried and refused: {minimal_media.refusal(features, sp=state.sp, like=like)}."
        )


def encode_vision(
    features: Callable[..., Any],
    outputs: Mapping[str, Any],
    inputs_embeds: Tensor,
    images: tuple[Tensor | None, Tensor | None],
    videos: tuple[Tensor | None, Tensor | None],
    kwargs: Mapping[str, Any],
    state: ParallelState,
) -> tuple[Mapping[str, Any], Tensor]:
    """See `ops.encode_vision`."""
    image_pixels, image_grids = images
    video_pixels, video_grids = videos
    if image_pixels is None or video_pixels is None:
        # Models whose images and videos go together take grids: a minimal one is always known.
        only = video_pixels if image_pixels is None else image_pixels
        return outputs, absent_tower(inputs_embeds, only, features, state)
    if image_grids is None or video_grids is None:
        raise ValueError("Images and videos that go through a tower together need the grids of both.")
    pixels, grids = torch.cat([image_pixels, video_pixels]), torch.cat([image_grids, video_grids])
    together = features(pixels, grids, return_dict=True, **join_precomputed(kwargs))
    count = len(image_grids)
    split = {"image": _items(together, slice(None, count)), "video": _items(together, slice(count, None))}
    given = {kind: output for kind, output in outputs.items() if output is not None}
    return {**split, **given}, inputs_embeds


# ---------------------------------------------------------------------------------- images and videos together


def join_precomputed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a joint pass: what the collator computed for images and for videos, one after the other.

    A value that only one of them has, or of a name not known here, is left out: upstream's expression computes it.
    """
    plain = {
        name: value for name, value in without_packing(kwargs).items() if not name.startswith(("image_", "video_"))
    }
    joined = {}
    for name, join in _JOINS.items():
        first, second = kwargs.get(f"image_{name}"), kwargs.get(f"video_{name}")
        if first is not None and second is not None:
            joined[f"image_{name}"] = join(first, second)
    return plain | joined


def _bounds(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second[1:] + first[-1]])


def _rows(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second])


_JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "cu_seqlens": _bounds,
    "cu_window_seqlens": _bounds,
    "max_seqlen": max,
    "max_window_seqlen": max,
    "position_ids": _rows,
    "interp_indices": _rows,
    "interp_weights": _rows,
    "split_sizes": lambda first, second: [*first, *second],
    "window_index": lambda first, second: torch.cat([first, second + len(first)]),
}


def _items(output: Any, chosen: slice) -> Any:
    """The output with the features of some items: per-item tuples are cut, tensors over all of them left out.

    What upstream's recorder added, as router logits, is not a field of the output's class and belongs to no item.
    """
    return type(output)(**{field.name: _cut(getattr(output, field.name), chosen) for field in fields(output)})


def _cut(value: Any, chosen: slice) -> Any:
    if not isinstance(value, tuple | list):
        return None
    if value and isinstance(value[0], tuple | list):  # a level of deepstack each
        return type(value)(level[chosen] for level in value)
    return value[chosen]
