"""The sum of squares of large tensors in one pass over memory, for the norm of gradients.

Each program adds up its own part in fp32; no program adds to another's sum, so the result is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_SIZE, _BLOCKS_PER_PROGRAM = 2048, 4


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The squares of all elements of all tensors, added up: a scalar fp32 tensor; arguments and errors of `partial_sums`."""
    return partial_sums(tensors)[0].sum()


def partial_sums(tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sums of squares of parts of the tensors, `(P,)` fp32, and views of those that belong to each tensor.

    Args:
        tensors: at least one, contiguous, on one device, of any sizes and dtypes.

    Raises:
        ValueError: a tensor that is not contiguous.
    """
    if any(not tensor.is_contiguous() for tensor in tensors):
        raise ValueError(
            "sum_of_squares takes contiguous tensors, and at least one is not. To fix: pass tensor.contiguous()."
        )
    num_programs = [triton.cdiv(tensor.numel(), _BLOCK_SIZE * _BLOCKS_PER_PROGRAM) for tensor in tensors]
    all_sums = torch.empty(sum(num_programs), dtype=torch.float32, device=tensors[0].device)
    by_tensor = all_sums.split(num_programs)
    for tensor, sums in zip(tensors, by_tensor, strict=True):
        if len(sums):
            _sum_squares[(len(sums),)](
                tensor,
                sums,
                tensor.numel(),
                BLOCK_SIZE=_BLOCK_SIZE,
                BLOCKS_PER_PROGRAM=_BLOCKS_PER_PROGRAM,
                num_warps=8,
            )
    return all_sums, by_tensor


@triton.jit
def _sum_squares(values, partial_sums, numel, BLOCK_SIZE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr):
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK_SIZE * BLOCKS_PER_PROGRAM
    for block in range(BLOCKS_PER_PROGRAM):
        offset = first + block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        value = tl.load(values + offset, mask=offset < numel, other=0.0).to(tl.float32)
        total += value * value
    tl.store(partial_sums + tl.program_id(0), tl.sum(total))
