"""A fast check for NaN and infinities, on blocks that are in the processor's cache."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether a floating-point tensor on the CPU has no NaN and no infinity.

    Read as integers, these are larger than all other values. Uses numpy, which stays in the calling thread: torch would wake
    its thread pool for every block of every reader.
    """
    if tensor.numel() == 0:
        return True
    signed, infinity = _as_integers(tensor.dtype)
    bits = tensor.view(signed).numpy()
    minus_infinity = infinity + (1 << (8 * tensor.dtype.itemsize - 1))
    return bool(bits.max() < infinity) and bool(bits.view(f"u{bits.dtype}").max() < minus_infinity)


@cache
def _as_integers(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The integer dtype of the same width, and infinity's bits as such an integer."""
    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return signed, int(torch.tensor(math.inf, dtype=dtype).view(signed))
