"""The gradients of the experts' biases: column sums over each expert's rows, in a fixed order and fp32.

T tokens   P padded rows   E experts   N columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchgen.kernels.moe.plan import BLOCK_M, Plan

_BLOCK_N = 64
_BLOCK_R = 64


def sum_padded_rows(padded: Tensor, plan: Plan, dtype: torch.dtype) -> Tensor:
    """`[E, N]`: the sum of each expert's rows of `padded [P, N]`."""
    return _launch(padded, None, plan, 1, dtype)


def sum_token_rows(tokens: Tensor, weights: Tensor, plan: Plan, dtype: torch.dtype) -> Tensor:
    """`[E, N]`: for each expert the sum over its rows of `weight[slot] * tokens[token]`, `tokens [T, N]`."""
    return _launch(tokens, weights, plan, weights.shape[1], dtype)


def _launch(rows: Tensor, weights: Tensor | None, plan: Plan, top_k: int, dtype: torch.dtype) -> Tensor:
    num_experts, size = plan.num_experts, rows.shape[1]
    out = torch.empty(num_experts, size, dtype=dtype, device=rows.device)
    _expert_sums[(num_experts, triton.cdiv(size, _BLOCK_N))](
        rows,
        weights,
        plan.slot_of_padded,
        plan.row_start,
        plan.tile_start,
        out,
        N=size,
        TOP_K=top_k,
        TILE_ROWS=BLOCK_M,
        BLOCK_R=_BLOCK_R,
        BLOCK_N=_BLOCK_N,
        num_warps=4,
    )
    return out


@triton.jit
def _expert_sums(
    rows,
    weights,
    slot_of_padded,
    row_start,
    tile_start,
    out,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(row_start + expert)
    count = tl.load(row_start + expert + 1) - first
    sums = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    for start in range(0, count, BLOCK_R):
        offset = start + tl.arange(0, BLOCK_R)
        valid = offset < count
        mask = valid[:, None] & (column < N)[None, :]
        padded = tl.load(tile_start + expert) * TILE_ROWS + offset
        if weights is None:
            source = padded.to(tl.int64)[:, None]
            value = tl.load(rows + source * N + column[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            slot = tl.load(slot_of_padded + padded, mask=valid, other=0)
            weight = tl.load(weights + slot, mask=valid, other=0.0).to(tl.float32)
            source = (slot // TOP_K).to(tl.int64)[:, None]
            value = tl.load(rows + source * N + column[None, :], mask=mask, other=0.0).to(tl.float32)
            value *= weight[:, None]
        sums += value
    tl.store(out + expert * N + column, tl.sum(sums, 0).to(out.dtype.element_ty), mask=column < N)
