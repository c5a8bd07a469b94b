"""Cases of a bench that fail: what their row says, and that no rank goes on while others wait for it."""

from __future__ import annotations

import os
import sys
import time
import traceback

import torch
import torch.distributed as dist

OUT_OF_MEMORY = "out of memory"
SECONDS = 20.0  # in which the other ranks fail, too, if they do


def reason(error: Exception) -> str:
    """What a row says of an error: that memory was too small, or its first line; the whole of it goes to stderr."""
    if isinstance(error, torch.OutOfMemoryError) or "CUDA out of memory" in str(error):
        return OUT_OF_MEMORY
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:160]


def leave_unless_shared(case: str) -> None:
    """Ends the process if other ranks do not fail in the same case: their collectives would wait for this one.

    The launcher ends the others then, and the same command goes on after this case where rows are kept in a file.

    Args:
        case: what all ranks call it; each case fails once at most.
    """
    store, key = dist.distributed_c10d._get_default_store(), f"failed/{case}"
    store.add(key, 1)
    until = time.monotonic() + SECONDS
    while store.add(key, 0) < dist.get_world_size():
        if time.monotonic() > until:
            print(f"rank {dist.get_rank()} alone failed in {case}: the run ends here", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(0.1)
