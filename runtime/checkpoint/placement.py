"""Which box of a tensor each rank holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from patchgen.runtime.checkpoint.moves import Box, whole


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
        start, stop = box[placement.dim]
        chunk = -(-(stop - start) // mesh.size(dimension))  # as torch.chunk: the last ones may be short or empty
        first = min(start + place[dimension] * chunk, stop)
        box[placement.dim] = (first, min(first + chunk, stop))
    return tuple(box)


def world() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_gather(value: object) -> list:
    """`value` of every rank."""
    _, size = world()
    if size == 1:
        return [value]
    gathered = [None] * size
    dist.all_gather_object(gathered, value)
    return gathered


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


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank that calls it (all must)."""
    return torch.as_tensor(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
