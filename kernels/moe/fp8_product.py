"""Grouped products in FP8, with scales by row of both factors, which the result is multiplied with.

    fp8_product              out[p] = rows[p] @ weight[e]^T
    fp8_weight_gradient      out[e] = sum over its rows of left[:, p] right[:, p]^T

The tensor cores add in some 14 bits. What that adds to the rounding of e4m3 (3.7e-2 of a product of random factors) is
measured: 0.8e-3 over a depth of 2,048, 1.9e-3 over 7,168, and a bf16 result rounds by 1.7e-3 (H200). So nothing is promoted to fp32
on the way, which would cost a fifth of the speed or more; see kernels/README.md.

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
from patchgen.kernels.moe.schedule import FP8_ROWS, FP8_WEIGHTS, multiply, num_programs, row_tiles_per_group


def fp8_product(rows: Quantised, weight: Quantised, plan: Plan, dtype: torch.dtype) -> Tensor:
    """`[P, N]`, padded; unused tiles are not written, padding rows are undefined."""
    depth, columns = rows.values.shape[1], weight.values.shape[1]
    out = torch.empty(plan.num_padded, columns, dtype=dtype, device=rows.values.device)
    blocks = FP8_ROWS
    _fp8_product[(num_programs(out, blocks.per_sm),)](
        TensorDescriptor.from_tensor(rows.values, [BLOCK_M, blocks.k]),
        rows.scales,
        TensorDescriptor.from_tensor(weight.values, [1, blocks.n, blocks.k]),
        weight.scales,
        TensorDescriptor.from_tensor(out, [BLOCK_M, blocks.n]),
        plan.tile_start,
        plan.tiles,
        plan.num_experts,
        plan.tiles.shape[1],
        D=depth,
        N=columns,
        BLOCK_M=BLOCK_M,
        BLOCK_N=blocks.n,
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_m = tl.load(tile_start + num_experts)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        m, n, expert, _, _ = describe_tile(index, num_m, num_n, tiles, num_tiles, GROUP)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(0, D, BLOCK_K):
            a = rows.load([m * BLOCK_M, k])
            b = weight.load([expert, n * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K)
            acc = multiply(a, b.T, acc)
        column = n * BLOCK_N + tl.arange(0, BLOCK_N)
        by_row = tl.load(row_scales + m * BLOCK_M + tl.arange(0, BLOCK_M))
        by_column = tl.load(weight_scales + expert * N + column, mask=column < N, other=0.0)
        out.store([m * BLOCK_M, n * BLOCK_N], (acc * by_row[:, None] * by_column[None, :]).to(out.dtype))


def fp8_weight_gradient(left: Tensor, right: Tensor, scales: Tensor, plan: Plan, dtype: torch.dtype) -> Tensor:
    """`[E, A, B]` from `left [A, P]` and `right [B, P]` in FP8, of which padding must multiply to zero, times `scales [E]`."""
    out = torch.empty(plan.num_experts, left.shape[0], right.shape[0], dtype=dtype, device=left.device)
    blocks = FP8_WEIGHTS
    _fp8_weight_gradient[(num_programs(out, blocks.per_sm),)](
        TensorDescriptor.from_tensor(left, [BLOCK_M, blocks.k]),
        TensorDescriptor.from_tensor(right, [blocks.n, blocks.k]),
        scales,
        TensorDescriptor.from_tensor(out, [1, BLOCK_M, blocks.n]),
        plan.tile_start,
        plan.num_experts,
        A=left.shape[0],
        B=right.shape[0],
        TILE_ROWS=BLOCK_M,
        BLOCK_A=BLOCK_M,
        BLOCK_B=blocks.n,
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
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_a: tl.constexpr = (A + BLOCK_A - 1) // BLOCK_A
    num_b: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    per_expert: tl.constexpr = num_a * num_b
    for index in tl.range(tl.program_id(0), num_experts * per_expert, tl.num_programs(0)):
        expert = index // per_expert
        a_tile, b_tile = tile_at(index % per_expert, num_a, num_b, GROUP)
        first = tl.load(tile_start + expert) * TILE_ROWS
        end = tl.load(tile_start + expert + 1) * TILE_ROWS
        acc = tl.zeros([BLOCK_A, BLOCK_B], dtype=tl.float32)
        for row in range(first, end, BLOCK_R):
            a = left.load([a_tile * BLOCK_A, row])
            b = right.load([b_tile * BLOCK_B, row])
            acc = multiply(a, b.T, acc)
        result = (acc * tl.load(scales + expert)).to(out.dtype)
        out.store([expert, a_tile * BLOCK_A, b_tile * BLOCK_B], result.reshape(1, BLOCK_A, BLOCK_B))
