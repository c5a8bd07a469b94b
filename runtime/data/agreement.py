"""Whether any rank has another batch: ranks that read streams do not know each other's lengths."""

from __future__ import annotations

import torch
import torch.distributed as dist


def any_rank(mine: bool) -> bool:
    """Whether `mine` is true on any rank; every rank must call it. Without torch.distributed there is one rank."""
    if not dist.is_initialized():
        return mine
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    flag = torch.tensor(int(mine), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
