"""Which box of a tensor each rank holds, and what ranks do together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.tensor_sources import Box, whole
from patchgen.runtime.parallel.collectives import gather_objects

FAILURES = (Exception, CheckpointException)  # DCP's own is a BaseException
Result = TypeVar("Result")


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`, without autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def box_of_rank(tensor: Tensor, rank: int | None = None) -> Box | None:
    """The part of `tensor` that `rank` (default: this one) holds; None if it is not on the tensor's mesh.

    FSDP2 cuts what expert parallelism has cut before, over a mesh that lists `ep` last: placements that cut such a
    dimension first carry a split factor, and all are then applied from the last mesh dimension to the first.
    """
    box = list(whole(tensor.shape))
    if not isinstance(tensor, DTensor):
        return tuple(box)
    mesh = tensor.device_mesh
    if rank is None:
        place = mesh.get_coordinate()
    else:
        found = (mesh.mesh == rank).nonzero()
        place = found[0].tolist() if len(found) else None
    if place is None:
        return None
    cuts = list(enumerate(tensor.placements))
    if any(hasattr(placement, "split_factor") for _, placement in cuts):
        cuts.reverse()
    for dimension, placement in cuts:
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise TypeError(f"{placement} divides a tensor into no boxes.")
        start, stop = box[placement.dim]
        chunk = -(-(stop - start) // mesh.size(dimension))  # as torch.chunk: the last ones may be short or empty
        first = min(start + place[dimension] * chunk, stop)
        box[placement.dim] = (first, min(first + chunk, stop))
    return tuple(box)


def has_copies(tensor: Tensor) -> bool:
    """Whether other ranks hold the same part of `tensor` as this one."""
    if not isinstance(tensor, DTensor):
        return world()[1] > 1
    sizes = tensor.device_mesh.shape
    return any(size > 1 and isinstance(one, Replicate) for size, one in zip(sizes, tensor.placements, strict=True))


def world() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def together(work: Callable[[], Result], what: str, group: dist.ProcessGroup | None = None) -> Result:
    """Does this rank's work, which must not wait for other ranks. Every rank calls it: all fail or none.

    Args:
        what: says what failed, for the error that ranks get whose own work did not.

    Raises:
        CheckpointError: on every rank, if the work failed on any; an error that all ranks share is told once.
    """
    error, told, result = None, ("", ()), None
    try:
        result = work()
    except FAILURES as caught:  # whatever it is, the other ranks must hear of it: they would wait
        error = caught
        is_told = isinstance(caught, CheckpointError)
        text = str(caught) if is_told else f"{type(caught).__name__}: {caught}"
        told = (text, caught.problems if is_told and caught.problems else (text,))
    ranks = gather_objects(told, group)
    if not any(text for text, _ in ranks):
        return cast(Result, result)  # this rank's work came to its end
    if isinstance(error, CheckpointError) and all(text == told[0] for text, _ in ranks):
        raise error
    where = [
        f"rank {rank}: {problem}" if len(ranks) > 1 else problem
        for rank, (_, problems) in enumerate(ranks)
        for problem in problems
    ]
    raise CheckpointError(what, where) from error


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if nothing."""
    shared = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in shared) else shared


def within(tensor: Tensor, outer: Box, inner: Box) -> Tensor:
    """The part `inner` of a tensor that holds `outer`."""
    for dim, ((start, _), (first, last)) in enumerate(zip(outer, inner, strict=True)):
        if (first - start, last - first) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, first - start, last - first)
    return tensor


def part_of_rank(tensor: Tensor, like: DTensor) -> Tensor:
    """The part of a whole tensor, of the shape of `like`, that this rank holds of `like`; this rank is on its mesh."""
    box = box_of_rank(like)
    if box is None:
        raise ValueError(f"This rank holds nothing of a tensor on {like.device_mesh}.")
    return within(tensor, whole(tensor.shape), box)
