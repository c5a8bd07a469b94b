"""Checks at start-up that a model computes the same features for an image and a video together as for each alone.

Ranks encode the images and videos of a batch in one pass of the tower (`ops.encode_vision`). A tower that mixes items, for
example by a mean over all patches, computes something else there, and a step depends on which items a rank holds.

    alone       a row with an image -> features        a row with a video -> features
    together    both rows as one row -> features of both
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.runtime import minimal_media, parallel
from patchgen.runtime.media_sizes import IMAGE, VIDEO
from patchgen.runtime.parallel import slice_media
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.selfcheck import tolerance_of, without_slices
from patchgen.runtime.parallel.state import ParallelState

METHODS = tuple(f"get_{kind}_features" for kind in (IMAGE, VIDEO))


@torch.no_grad()
def require_independent_items(
    model: nn.Module, state: ParallelState, *, vocab_size: int, tokens_per_rank: int = 11
) -> float:
    """Compares the features of a small image and video, encoded together, with those of each alone.

    Args:
        model: after `shard_model` and with its weights. Every rank must call this.
        vocab_size: upper bound of the random token ids.

    Returns:
        The largest relative difference over all ranks; 0 for a model that does not take both, or of which no small rows are known.

    Raises:
        ValueError: they differ by more than rounding.
    """
    owners = [part for part in (model, *model.children()) if all(hasattr(part, name) for name in METHODS)]
    if not owners:
        return 0.0
    rows = dict(slice_media.rows(model, state, vocab_size=vocab_size, tokens_per_rank=tokens_per_rank))
    if not {IMAGE, VIDEO} <= rows.keys():
        return 0.0
    was_training = model.training
    model.eval()
    features = functools.partial(_features, model, owners, state)
    # Rows of a kind have the same random media: items that are equal do not show what each takes from the other.
    video = {name: value * 0.5 + 0.1 if value.is_floating_point() else value for name, value in rows[VIDEO].items()}
    alone = torch.cat([features(rows[IMAGE]), features(video)])
    together = features(_joined(rows[IMAGE], video))
    model.train(was_training)
    difference = torch.full((), float("inf"), device=alone.device)
    if together.shape == alone.shape:
        difference = (together - alone).abs().max() / alone.abs().max().clamp(min=1e-12)
    difference = difference.nan_to_num(nan=float("inf"))  # a MAX reduction may lose a NaN of one rank
    worst = float(all_reduce(difference, op=dist.ReduceOp.MAX, operation="compare features of items with each alone"))
    if worst > tolerance_of(next(model.parameters()).dtype):
        raise ValueError(
            f"{type(model).__name__.removeprefix('FSDP')} computes other features for an image and a video in one pass of its "
            f"tower than for each alone: they differ by {worst:.1e} of the largest. Some part of the tower mixes items, so a "
            "step would depend on which items a rank holds. To fix: change upstream's tower to treat items one by one."
        )
    return worst


def _joined(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """One row with the tokens and media of both."""
    tokens = {name: torch.cat([first[name], second[name]], dim=1) for name in first.keys() & second.keys()}
    positions = torch.arange(tokens["input_ids"].shape[1])[None]
    return {**first, **second, **tokens, "position_ids": positions}


def _features(model: nn.Module, owners: Sequence[nn.Module], state: ParallelState, row: dict[str, Tensor]) -> Tensor:
    """The features of a row's items, one after another, in fp32 `(n,)`."""
    inputs = {name: value.to(state.data_mesh.device_type) for name, value in row.items()}
    with _recorded(owners) as recorded, parallel.using(without_slices(state)):
        model(**inputs, use_cache=False)
    return torch.cat(recorded)


@contextlib.contextmanager
def _recorded(owners: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Records the features that `METHODS` of a head or its model return in the block; those of a method that another calls
    once."""
    recorded, running = list[Tensor](), list[nn.Module]()

    def recording(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def record(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            running.append(self)
            try:
                output = method(self, *args, **kwargs)
            finally:
                running.pop()
            if not running and any(self is owner for owner in owners):  # no copy that is asked for its minimal inputs
                features = getattr(output, "pooler_output", None)
                tensors = minimal_media.feature_tensors(output if features is None else features)
                recorded.extend(tensor.float().flatten() for tensor in tensors)
            return output

        return record

    places = [(kind, name) for kind in {type(owner) for owner in owners} for name in METHODS]
    own = {place: vars(place[0]).get(place[1]) for place in places}
    for kind, name in places:
        setattr(kind, name, recording(getattr(kind, name)))
    try:
        yield recorded
    finally:
        for (kind, name), method in own.items():
            if method is None:
                delattr(kind, name)  # inherited
            else:
                setattr(kind, name, method)
