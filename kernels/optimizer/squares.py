"""The sum of squares of large tensors in one pass over memory, for the norm of gradients.

Each program adds up its own part in fp32; no program adds to another's sum, so the result is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _BLOCKS = 2048, 4  # elements per block, blocks per program


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The squares of all elements of all tensors, added up: a scalar fp32 tensor.

    Args:
        tensors: at least one, contiguous, on one device, of any sizes and dtypes.

    Raises:
        ValueError: a tensor that is not contiguous.
    """
    if any(not tensor.is_contiguous() for tensor in tensors):
        raise ValueError("sum_of_squares takes contiguous tensors.")
    programs = [triton.cdiv(tensor.numel(), _BLOCK * _BLOCKS) for tensor in tensors]
    parts = torch.empty(sum(programs), dtype=torch.float32, device=tensors[0].device)
    for tensor, part in zip(tensors, parts.split(programs), strict=True):
        if len(part):
            _add_up[(len(part),)](tensor, part, tensor.numel(), BLOCK=_BLOCK, BLOCKS=_BLOCKS, num_warps=8)
    return parts.sum()


@triton.jit
def _add_up(values, parts, num, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    for block in range(BLOCKS):
        offset = first + block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(values + offset, mask=offset < num, other=0.0).to(tl.float32)
        total += value * value
    tl.store(parts + tl.program_id(0), tl.sum(total))
