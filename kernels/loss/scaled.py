"""A tensor times a number on the device, rounded once to another dtype, in one pass.

torch's multiplication into another dtype moves 1.5 TB/s on an H200, where memory gives 4.2. Floor: N elements read and
N written, at the speed of memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@torch.library.custom_op("patchgen::scaled", mutates_args=())
def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`(tensor * factor).to(dtype)` without the product in memory.

    Args:
        tensor: any shape, contiguous, fp32 or narrower.
        factor: one number, on the same device.
    """
    out = torch.empty_like(tensor, dtype=dtype)
    if tensor.numel() > 0:
        _scaled[(triton.cdiv(tensor.numel(), _BLOCK),)](tensor, factor, out, tensor.numel(), BLOCK=_BLOCK, num_warps=8)
    return out


@scaled.register_fake
def _(tensor, factor, dtype):
    return torch.empty_like(tensor, dtype=dtype)


@triton.jit
def _scaled(tensor, factor, out, num, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(tensor + offset, mask=offset < num, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=offset < num)
