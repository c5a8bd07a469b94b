"""Errors that say nothing about a model or its inputs: the device or the ranks failed, and other inputs are no remedy."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

TYPES = (
    torch.OutOfMemoryError,
    dist.DistError,
    *((torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()),
)
# The allocator of CPUs, the driver's of GPUs and gloo raise RuntimeErrors of no type of their own. Gloo's messages begin with
# the file that raises them; those of a closed pair of ranks do not.
_MESSAGES = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA driver error: out of memory|/gloo/transport/"
    r"|Timed out waiting|Connection closed by peer|Connection reset|Application timeout caused pair closure"
)


def is_failure(error: BaseException) -> bool:
    """Whether an error is of the device or of the ranks."""
    return isinstance(error, TYPES) or (isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error))))


def raise_failure(error: BaseException) -> None:
    """Raises `error` again if it is of the device or of the ranks; for handlers of what a model may raise."""
    if is_failure(error):
        raise error
