"""Whether any rank has another batch: ranks that read streams do not know each other's lengths."""

from __future__ import annotations

import torch
import torch.distributed as dist

from patchgen.runtime.parallel.collectives import all_reduce


def any_rank(mine: bool) -> bool:
    """Whether `mine` is true on any rank; every rank must call it. Without torch.distributed there is one rank."""
    if not dist.is_initialized():
        return mine
    # Over the host where the process group reaches it: then nothing waits for a device.
    device = "cpu" if "cpu" in dist.get_backend_config() else "cuda"
    flag = torch.tensor(int(mine), device=device)
    return bool(all_reduce(flag, operation="ask whether any rank has another batch", op=dist.ReduceOp.MAX).item())
