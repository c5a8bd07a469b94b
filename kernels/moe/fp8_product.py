"""Grouped products in FP8, with scales by row of both factors, which the result is multiplied with.

    fp8_product              out[p] = rows[p] @ weight[e]^T
    fp8_weight_gradient      out[e] = sum over its rows of left[:, p] right[:, p]^T

The tensor cores keep few bits while they add, so each step of 128 along the depth is added to sums in fp32 ("promoted").
Where `is_specialized_here`, `fp8_product_specialized` computes the same bits in less time. Here a tile is two products of half
its columns, each of which is promoted while the other waits: one product of all columns would not fit the registers twice.

    P padded rows   D depth   E experts   N columns   A, B columns of the two factors of a weight gradient
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from patchgen.kernels.moe.fp8_values import Quantised
from patchgen.kernels.moe.plan import BLOCK_M, VARYING, Plan, describe_tile, tile_at
from patchgen.kernels.moe.schedule import (
    FP8_ROWS,
    FP8_WEIGHTS,
    is_specialized_here,
    num_programs,
    row_tiles_per_group,
)

PROMOTED = tl.constexpr(128)
"""Products that the tensor cores sum on their own, at most."""


def fp8_product(rows: Quantised, weight: Quantised, plan: Plan, dtype: torch.dtype) -> Tensor:
    """`[P, N]`, padded; unused tiles are not written, padding rows are undefined."""
    depth, columns = rows.values.shape[1], weight.values.shape[1]
    out = torch.empty(plan.num_padded, columns, dtype=dtype, device=rows.values.device)
    if is_specialized_here(rows.values) and is_specialized_here(weight.values):
        from patchgen.kernels.moe.fp8_product_specialized import specialized_product  # needs Gluon

        specialized_product(*rows, *weight, out, plan)
        return out
    blocks, half = FP8_ROWS, FP8_ROWS.n // 2
    _fp8_product[(num_programs(out, blocks.per_sm),)](
        TensorDescriptor.from_tensor(rows.values, [BLOCK_M, blocks.k]),
        rows.scales,
        TensorDescriptor.from_tensor(weight.values, [1, half, blocks.k]),
        weight.scales,
        TensorDescriptor.from_tensor(out, [BLOCK_M, half]),
        plan.tile_start,
        plan.tiles,
        plan.num_experts,
        plan.tiles.shape[1],
        D=depth,
        N=columns,
        BLOCK_M=BLOCK_M,
        HALF_N=half,
        BLOCK_K=blocks.k,
        GROUP=row_tiles_per_group(blocks, triton.cdiv(columns, blocks.n)),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out


@triton.jit(do_not_specialize=VARYING)
def _fp8_product(
    rows,
    row_scales,
    weight,
    weight_scales,
    out,
    tile_start,
    tiles,
    num_experts,
    num_tiles,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HALF_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_m = tl.load(tile_start + num_experts)
    num_n: tl.constexpr = (N + 2 * HALF_N - 1) // (2 * HALF_N)
    for index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        m, n, expert, _, _ = describe_tile(index, num_m, num_n, tiles, num_tiles, GROUP)
        first_column = n * (2 * HALF_N)
        first = tl.zeros([BLOCK_M, HALF_N], dtype=tl.float32)
        second = tl.zeros([BLOCK_M, HALF_N], dtype=tl.float32)
        for k in range(0, D, BLOCK_K):
            a = rows.load([m * BLOCK_M, k])
            b = weight.load([expert, first_column, k]).reshape(HALF_N, BLOCK_K)
            first = multiply_promoted(a, b.T, first)
            b = weight.load([expert, first_column + HALF_N, k]).reshape(HALF_N, BLOCK_K)
            second = multiply_promoted(a, b.T, second)
        by_row = tl.load(row_scales + m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        column = first_column + tl.arange(0, HALF_N)
        by_column = tl.load(weight_scales + expert * N + column, mask=column < N, other=0.0)
        out.store([m * BLOCK_M, first_column], (first * by_row * by_column[None, :]).to(out.dtype))
        column += HALF_N
        by_column = tl.load(weight_scales + expert * N + column, mask=column < N, other=0.0)
        out.store([m * BLOCK_M, first_column + HALF_N], (second * by_row * by_column[None, :]).to(out.dtype))


@triton.jit
def multiply_promoted(a, b, acc):
    """`acc + a @ b`, the only product of two tiles here."""
    tl.static_assert(a.shape[1] == PROMOTED)
    return tl.dot(a, b, acc, max_num_imprecise_acc=PROMOTED)


def fp8_weight_gradient(left: Tensor, right: Tensor, scales: Tensor, plan: Plan, dtype: torch.dtype) -> Tensor:
    """`[E, A, B]` from `left [A, P]` and `right [B, P]` in FP8, of which padding must multiply to zero, times `scales [E]`."""
    out = torch.empty(plan.num_experts, left.shape[0], right.shape[0], dtype=dtype, device=left.device)
    if is_specialized_here(left) and is_specialized_here(right):
        from patchgen.kernels.moe.fp8_product_specialized import specialized_gradient  # needs Gluon

        specialized_gradient(left, right, scales, out, plan)
        return out
    blocks, half = FP8_WEIGHTS, FP8_WEIGHTS.n // 2
    _fp8_weight_gradient[(num_programs(out, blocks.per_sm),)](
        TensorDescriptor.from_tensor(left, [BLOCK_M, blocks.k]),
        TensorDescriptor.from_tensor(right, [half, blocks.k]),
        scales,
        TensorDescriptor.from_tensor(out, [1, BLOCK_M, half]),
        plan.tile_start,
        plan.num_experts,
        A=left.shape[0],
        B=right.shape[0],
        TILE_ROWS=BLOCK_M,
        BLOCK_A=BLOCK_M,
        HALF_B=half,
        BLOCK_R=blocks.k,
        GROUP=blocks.group,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out


@triton.jit
def _fp8_weight_gradient(
    left,
    right,
    scales,
    out,
    tile_start,
    num_experts,
    A: tl.constexpr,
    B: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    HALF_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_a: tl.constexpr = (A + BLOCK_A - 1) // BLOCK_A
    num_b: tl.constexpr = (B + 2 * HALF_B - 1) // (2 * HALF_B)
    per_expert: tl.constexpr = num_a * num_b
    for index in tl.range(tl.program_id(0), num_experts * per_expert, tl.num_programs(0)):
        expert = index // per_expert
        a_tile, b_tile = tile_at(index % per_expert, num_a, num_b, GROUP)
        first_b = b_tile * (2 * HALF_B)
        first_row = tl.load(tile_start + expert) * TILE_ROWS
        end = tl.load(tile_start + expert + 1) * TILE_ROWS
        first = tl.zeros([BLOCK_A, HALF_B], dtype=tl.float32)
        second = tl.zeros([BLOCK_A, HALF_B], dtype=tl.float32)
        for row in range(first_row, end, BLOCK_R):
            a = left.load([a_tile * BLOCK_A, row])
            first = multiply_promoted(a, right.load([first_b, row]).T, first)
            second = multiply_promoted(a, right.load([first_b + HALF_B, row]).T, second)
        scale = tl.load(scales + expert)
        result = (first * scale).to(out.dtype).reshape(1, BLOCK_A, HALF_B)
        out.store([expert, a_tile * BLOCK_A, first_b], result)
        result = (second * scale).to(out.dtype).reshape(1, BLOCK_A, HALF_B)
        out.store([expert, a_tile * BLOCK_A, first_b + HALF_B], result)
