"""Every rank runs every tower, whatever its batch contains.

FSDP gathers a tower's weights when the tower runs, so it must run on all ranks or on none. A rank without an image runs the
vision tower on a minimal one, whose features are added as `0 * mean`: the collectives happen, every parameter gets a
gradient of zero, and nothing else changes.

    rank 0   images and videos    one pass over both together
    rank 1   videos only          one pass
    rank 2   text only            one pass over a minimal image, times zero

The pass runs at the place of the real one, so that towers run in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from patchgen.runtime import minimal_media
from patchgen.runtime.parallel import collectives, unused
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.tensor_cache import longest

TEXT_ARGUMENTS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "real_tokens",
    "stacked_position_ids",
)
"""Arguments about the text: document boundaries of packed rows, padding and positions."""


def without_text_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """See `ops.tower_kwargs`."""
    return {name: value for name, value in kwargs.items() if name not in TEXT_ARGUMENTS}


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
    if state is None or state.config.num_batches == 1:  # with several, ranks may have different modalities
        return inputs_embeds
    # Ranks with inputs compute it too: a missing minimal input is then found in the first forward, on all ranks.
    minimal = minimal_media.minimal_inputs(features, sp=state.sp, like=inputs_embeds)
    if minimal is None:
        _require_real_inputs(inputs, features, inputs_embeds, state)
    if inputs is not None or minimal is None:
        return inputs_embeds
    statistics = _BatchNormStatistics(features.__self__)
    with statistics.copied():
        values = minimal_media.feature_tensors(features(**minimal))
    zero = torch.stack([value.float().mean() for value in values]).sum() * 0.0
    unused.mark_stand_in(zero)
    statistics.copy_in_backward(zero)
    return inputs_embeds + zero.to(inputs_embeds.dtype)


class _BatchNormStatistics:
    """The statistics of a model's batch norms, which minimal inputs must not change: they are not data of the run."""

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self._original = [(norm, dict(norm.named_buffers(recurse=False))) for norm in norms]
        self._copies = [
            (norm, {name: value.clone() for name, value in buffers.items()}) for norm, buffers in self._original
        ]
        self._users, self._lock = 0, threading.Lock()  # nodes of a backward run in a thread per device

    @contextlib.contextmanager
    def copied(self) -> Iterator[None]:
        """Within the block batch norms update copies."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def copy_in_backward(self, value: Tensor) -> None:
        """Lets batch norms update copies wherever the backward of `value` computes its forward again: a recomputation runs
        within the backward of a node that it serves, whoever asked for it."""
        if not self._original:
            return
        for node in unused.graph_nodes(value):
            if not hasattr(node, "variable"):
                node.register_prehook(self._begin)
                node.register_hook(self._end)

    def _begin(self, *_gradients: object) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                for norm, copies in self._copies:
                    norm._buffers.update(copies)

    def _end(self, *_gradients: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for norm, buffers in self._original:
                    norm._buffers.update(buffers)


def _require_real_inputs(inputs: object, features: Callable[..., Any], like: Tensor, state: ParallelState) -> None:
    """Raises ValueError on all ranks if one of them lacks an input without a minimal stand-in. One host sync per forward."""
    absent = torch.tensor([inputs is None], dtype=torch.int32, device=like.device)
    lacking = int(collectives.all_reduce(absent, operation="count the ranks without an input of a tower"))
    if lacking:
        kind = minimal_media.kind_of(features.__name__)
        raise ValueError(
            f"No minimal {kind} is known for {type(features.__self__).__name__}, so every rank needs one, and {lacking} ranks "
            f"have none. Tried and refused: {minimal_media.refusal(features, sp=state.sp, like=like)}."
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
        # Models that encode images and videos together take grids: a minimal input is always known.
        only = video_pixels if image_pixels is None else image_pixels
        return outputs, absent_tower(inputs_embeds, only, features, state)
    if image_grids is None or video_grids is None:
        raise ValueError(
            "A tower that encodes images and videos in one pass needs the grids of both; one of them is None."
        )
    pixels, grids = torch.cat([image_pixels, video_pixels]), torch.cat([image_grids, video_grids])
    joint = features(pixels, grids, return_dict=True, **join_precomputed(kwargs))
    count = len(image_grids)
    split = {"image": _items(joint, slice(None, count)), "video": _items(joint, slice(count, None))}
    computed = {kind: output for kind, output in outputs.items() if output is not None}
    return {**split, **computed}, inputs_embeds


# ---------------------------------------------------------------------------------- joint images and videos


def join_precomputed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a joint pass: what the collator computed for images and for videos, concatenated.

    A value that only one of them has, or with a name unknown here, is dropped: upstream's expression computes it.
    """
    shared = {
        name: value
        for name, value in without_text_arguments(kwargs).items()
        if not name.startswith(("image_", "video_"))
    }
    joined = {}
    for name, join in _JOINS.items():
        first, second = kwargs.get(f"image_{name}"), kwargs.get(f"video_{name}")
        if first is not None and second is not None:
            joined[f"image_{name}"] = join(first, second)
    return shared | joined


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


def _items(output: Any, selected: slice) -> Any:
    """The output for some of the items: per-item tuples are sliced, tensors over all items dropped.

    What upstream's recorder adds, such as router logits, is not a field of the output's class and belongs to no item.
    """
    return type(output)(**{field.name: _slice(getattr(output, field.name), selected) for field in fields(output)})


def _slice(value: Any, selected: slice) -> Any:
    if not isinstance(value, tuple | list):
        return None
    if value and isinstance(value[0], tuple | list):  # a level of deepstack each
        return type(value)(level[selected] for level in value)
    return value[selected]
