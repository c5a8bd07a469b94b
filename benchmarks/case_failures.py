"""Failed cases of a benchmark: their reason for the row, and a way to end ranks that would wait for a failed one."""

from __future__ import annotations

import os
import sys
import time
import traceback

import torch
import torch.distributed as dist

OUT_OF_MEMORY = "out of memory"
SECONDS = 20.0  # within which other ranks fail too, if at all


def reason(error: Exception) -> str:
    """The reason for a row: out of memory, or the first line of the error, which is printed to stderr."""
    if isinstance(error, torch.OutOfMemoryError) or "CUDA out of memory" in str(error):
        return OUT_OF_MEMORY
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:160]


def leave_unless_shared(case: str) -> None:
    """Ends the process unless all ranks fail in the same case: the others would wait for it in their collectives.

    The launcher then ends the others, and the same command resumes after this case if rows are kept in a file.

    Args:
        case: its name, equal on all ranks; a case fails at most once.
    """
    store, key = dist.distributed_c10d._get_default_store(), f"failed/{case}"
    store.add(key, 1)
    until = time.monotonic() + SECONDS
    while store.add(key, 0) < dist.get_world_size():
        if time.monotonic() > until:
            print(f"rank {dist.get_rank()} alone failed in {case}: the run ends here", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(0.1)
