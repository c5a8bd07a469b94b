"""The sum over a token's rows, gathered by row number: no atomics, a fixed order, fp32.

    out[t] = sum_k weight[t, k] * rows[padded_of_slot[t, k]]

Floor: R * H read and T * H written, at the speed of memory.

    T tokens   K slots per token   H hidden size   R = T * K slots   P padded rows   E experts   N column tiles
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchgen.kernels.moe.plan import VARYING, Plan


def combine(rows: Tensor, weights: Tensor | None, plan: Plan, top_k: int) -> Tensor:
    """`[T, H]` from `rows [P, H]`, padded, and the routing weights `[T, K]` (None: all ones), in the dtype of `rows`."""
    return sum_slots(rows, weights, plan.padded_of_slot, top_k)


def sum_slots(rows: Tensor, weights: Tensor | None, row_of_slot: Tensor, top_k: int) -> Tensor:
    """`combine` with the row of each slot `[T * K]`; -1 for a slot without a row."""
    num_tokens, hidden_size = row_of_slot.numel() // top_k, rows.shape[1]
    out = torch.empty(num_tokens, hidden_size, dtype=rows.dtype, device=rows.device)
    if num_tokens == 0:
        return out
    block = min(triton.next_power_of_2(hidden_size), 1024)
    _combine[(num_tokens, triton.cdiv(hidden_size, block))](
        rows,
        weights,
        row_of_slot,
        out,
        H=hidden_size,
        TOP_K=top_k,
        BLOCK_H=block,
        num_warps=max(1, block // 256),
    )
    return out


@triton.jit
def _combine(
    rows,
    weights,
    padded_of_slot,
    out,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = sum_of_slots(rows, weights, padded_of_slot, token, column, H, TOP_K, BLOCK_H)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)


@triton.jit
def sum_of_slots(
    rows, weights, padded_of_slot, token, column, H: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr
):
    """The sum over a token's rows for some columns, in fp32."""
    in_bounds = column < H
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(padded_of_slot + token * TOP_K + k)
        value = tl.load(rows + row.to(tl.int64) * H + column, mask=in_bounds & (row >= 0), other=0.0).to(tl.float32)
        if weights is not None:
            weight = tl.load(weights + token * TOP_K + k).to(tl.float32)
            value *= tl.where(row >= 0, weight, 0.0)
        total += value
    return total


def router_gradient(
    partial: Tensor,
    plan: Plan,
    top_k: int,
    dtype: torch.dtype,
    grad_out: Tensor | None,
    top_k_index: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """The gradient of the routing weights `[T, K]`, summed in fp32.

    Args:
        partial: `[N, P]` fp32: for each padded row the products of output gradient and unweighted output, by column tile.
        grad_out, top_k_index, down_bias: `[T, H]`, `[T, K]`, `[E, H]`: the product of gradient and bias is added; all None
            without a bias.
    """
    num_rows = plan.num_rows
    out = torch.empty(num_rows // top_k, top_k, dtype=dtype, device=partial.device)
    hidden_size = 1 if grad_out is None else grad_out.shape[1]
    block = 256
    per_program = block if down_bias is None else 1
    _router_gradient[(triton.cdiv(num_rows, per_program),)](
        partial,
        plan.padded_of_slot,
        grad_out,
        top_k_index,
        down_bias,
        out,
        num_rows,
        *partial.shape,
        H=hidden_size,
        TOP_K=top_k,
        BLOCK=block,
        HAS_BIAS=down_bias is not None,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=VARYING)
def _router_gradient(
    partial,
    padded_of_slot,
    grad_out,
    top_k_index,
    down_bias,
    out,
    num_rows,
    num_partial,
    num_padded,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    if HAS_BIAS:  # one slot per program, over the columns of its bias
        slot = tl.program_id(0)
        row = tl.load(padded_of_slot + slot)
        valid = row >= 0
        expert = tl.where(valid, tl.load(top_k_index + slot), 0).to(tl.int64)
        token = (slot // TOP_K).to(tl.int64)
        sums = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, H, BLOCK):
            column = start + tl.arange(0, BLOCK)
            in_bounds = (column < H) & valid
            gradient = tl.load(grad_out + token * H + column, mask=in_bounds, other=0.0).to(tl.float32)
            sums += gradient * tl.load(down_bias + expert * H + column, mask=in_bounds, other=0.0).to(tl.float32)
        total = tl.sum(sums, 0)
        for n in range(num_partial):
            total += tl.load(partial + n * num_padded + row, mask=valid, other=0.0)
        tl.store(out + slot, total.to(out.dtype.element_ty))
    else:
        slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        rows = tl.load(padded_of_slot + slots, mask=slots < num_rows, other=-1)
        in_bounds = rows >= 0
        totals = tl.zeros([BLOCK], dtype=tl.float32)
        for n in range(num_partial):
            totals += tl.load(partial + n * num_padded + rows, mask=in_bounds, other=0.0)
        tl.store(out + slots, totals.to(out.dtype.element_ty), mask=slots < num_rows)
