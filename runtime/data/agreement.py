"""What ranks ask each other: ranks that read streams know neither each other's lengths nor each other's bad samples."""

from __future__ import annotations

import torch
import torch.distributed as dist

from patchgen.runtime.data.problems import Counters
from patchgen.runtime.parallel.collectives import all_reduce


def any_rank(mine: bool) -> bool:
    """Whether `mine` is true on any rank; every rank must call it. Without torch.distributed there is one rank."""
    if not dist.is_initialized():
        return mine
    # Over the host where the process group reaches it: then nothing waits for a device.
    device = "cpu" if "cpu" in dist.get_backend_config() else "cuda"
    flag = torch.tensor(int(mine), device=device)
    return bool(all_reduce(flag, operation="ask whether any rank has another batch", op=dist.ReduceOp.MAX).item())


def counters_of_all_ranks(mine: Counters, *, batch_index: int) -> Counters:
    """The counters of all batch groups together, where each reads a share of the samples; every rank must call it.

    Ranks with the same `batch_index` read the same samples and count once.
    """
    if not dist.is_initialized():
        return mine
    gathered: list[tuple[int, dict]] = [(0, {})] * dist.get_world_size()
    dist.all_gather_object(gathered, (batch_index, mine.as_dict()))
    total = Counters()
    for _, counters in sorted(dict(gathered).items()):
        total.merge(Counters.from_dict(counters))
    return total
