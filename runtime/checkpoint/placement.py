"""Which region of a tensor each rank holds, and work that succeeds on all ranks or fails on all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.lazy_tensors import Region, full_region
from patchgen.runtime.parallel.collectives import gather_objects

FAILURES = (Exception, CheckpointException)  # torch's distributed checkpoint (DCP) raises a BaseException
Result = TypeVar("Result")


def local_tensor(tensor: Tensor) -> Tensor:
    """The shard of `tensor` on this rank, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def region_of_rank(tensor: Tensor, rank: int | None = None) -> Region | None:
    """The region of `tensor` that `rank` (default: this one) holds; None if it is not on the tensor's mesh.

    FSDP2 shards a dimension that expert parallelism has already sharded, over a mesh that lists `ep` last: its placement
    then has a split factor, and placements apply from the last mesh dimension to the first.
    """
    region = list(full_region(tensor.shape))
    if not isinstance(tensor, DTensor):
        return tuple(region)
    mesh = tensor.device_mesh
    if rank is None:
        coordinate = mesh.get_coordinate()
    else:
        found = (mesh.mesh == rank).nonzero()
        coordinate = found[0].tolist() if len(found) else None
    if coordinate is None:
        return None
    cuts = list(enumerate(tensor.placements))
    if any(hasattr(placement, "split_factor") for _, placement in cuts):
        cuts.reverse()
    for dimension, placement in cuts:
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise TypeError(
                f"{placement} does not divide a tensor into regions of ranks: expected Shard or Replicate."
            )
        start, stop = region[placement.dim]
        chunk = -(-(stop - start) // mesh.size(dimension))  # as torch.chunk: the last ones may be short or empty
        first = min(start + coordinate[dimension] * chunk, stop)
        region[placement.dim] = (first, min(first + chunk, stop))
    return tuple(region)


def local_region(tensor: Tensor) -> Region:
    """The region of `tensor` that this rank, which is on its mesh, holds."""
    region = region_of_rank(tensor)
    if region is None:
        raise ValueError("This rank is not on the mesh of the tensor, and has no shard of it.")
    return region


def is_replicated(tensor: Tensor) -> bool:
    """Whether other ranks hold the same region of `tensor` as this one."""
    if not isinstance(tensor, DTensor):
        return rank_and_world_size()[1] > 1
    sizes = tensor.device_mesh.shape
    return any(size > 1 and isinstance(one, Replicate) for size, one in zip(sizes, tensor.placements, strict=True))


def device_of(tensors: Iterable[Tensor], otherwise: torch.device) -> torch.device:
    """The device for communication: that of the tensors' mesh, even if shards are kept on the CPU; `otherwise` without a mesh."""
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh is None:
        return otherwise
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def rank_and_world_size() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def run_on_all_ranks(work: Callable[[], Result], what: str, group: dist.ProcessGroup | None = None) -> Result:
    """Runs `work`, which must not wait for other ranks, on every rank. Collective.

    Args:
        what: what failed, the first line of the error.

    Raises:
        CheckpointError: on every rank, if the work failed on any. One that all ranks raised is raised unchanged.
    """
    error, report, result = None, ("", ()), None
    try:
        result = work()
    except FAILURES as caught:  # of any kind: the other ranks would wait for this one
        error = caught
        is_checkpoint_error = isinstance(caught, CheckpointError)
        text = str(caught) if is_checkpoint_error else f"{type(caught).__name__}: {cause_of(caught)}"
        report = (text, caught.problems if is_checkpoint_error and caught.problems else (text,))
    ranks = gather_objects(report, group)
    if not any(text for text, _ in ranks):
        return cast(Result, result)  # `work` returned on this rank
    if isinstance(error, CheckpointError) and all(text == report[0] for text, _ in ranks):
        raise error
    where = [
        f"rank {rank}: {problem}" if len(ranks) > 1 else problem
        for rank, (_, problems) in enumerate(ranks)
        for problem in problems
    ]
    raise CheckpointError(what, where) from error


def cause_of(error: BaseException) -> str:
    """The message of an error in one line; of one of DCP's, those of the ranks' errors that it wraps."""
    failures = getattr(error, "failures", None)
    if failures:
        parts = [f"rank {rank}: {type(inner[0]).__name__}: {inner[0]}" for rank, inner in failures.items()]
        return " ".join("; ".join(parts).split())
    return " ".join(str(error).split())


def intersection(a: Region, b: Region) -> Region | None:
    """The overlap of two regions; None if there is none."""
    overlap = tuple(
        (max(a_start, b_start), min(a_stop, b_stop)) for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True)
    )
    return None if any(start >= stop for start, stop in overlap) else overlap


def narrow_to(tensor: Tensor, outer: Region, inner: Region) -> Tensor:
    """A view of the region `inner`; `tensor` holds the region `outer`, which contains it."""
    for dim, ((start, _), (first, last)) in enumerate(zip(outer, inner, strict=True)):
        if (first - start, last - first) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, first - start, last - first)
    return tensor


def shard_like(tensor: Tensor, like: DTensor) -> Tensor:
    """The region of a full tensor that this rank holds of `like`, a DTensor of the same shape whose mesh includes this rank."""
    return narrow_to(tensor, full_region(tensor.shape), local_region(like))
