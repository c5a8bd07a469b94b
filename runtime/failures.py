"""Errors that say nothing about a model or its inputs: the device or the ranks failed, and other inputs are no remedy."""

from __future__ import annotations

import os
import re

import torch
import torch.distributed as dist

TYPES = (
    torch.OutOfMemoryError,
    dist.DistError,
    *((torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()),
)
# The allocator of CPUs, drivers and libraries of GPUs, Triton's launches and gloo raise RuntimeErrors of no type of their own.
# Gloo's messages begin with the file that raises them; those of a closed pair of ranks do not.
_MESSAGES = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory|_STATUS_ALLOC_FAILED"
    r"|(Triton Error \[CUDA\]|CUDA driver error): (out of memory|an illegal|device-side assert|unspecified launch)"
    r"|/gloo/|Timed out waiting|Connection closed by peer|Connection reset|Application timeout caused pair closure"
    r"|NCCL communicator was aborted"
)
_REQUESTED_BYTES = re.compile(r"tried to allocate (\d+) bytes")


def is_machine_failure(error: BaseException) -> bool:
    """Whether an error is of the device or of the ranks.

    A request for more memory than the machine has is none: a model computed that size from its inputs.
    """
    if isinstance(error, TYPES):
        return True
    requested = _REQUESTED_BYTES.search(str(error))
    if requested and int(requested[1]) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        return False
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))


def reraise_machine_failure(error: BaseException) -> None:
    """Raises `error` again if it is of the device or of the ranks; for handlers of what a model may raise."""
    if is_machine_failure(error):
        raise error
