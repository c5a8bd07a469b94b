"""Grouped product with a variable number of rows per expert: `out[r] = rows[r] @ weight[e] (+ bias[e])`.

Used for the second half of the forward (`a @ down^T`), the gradient of the gathered rows (`dh @ gate_up`) and thin products
of adapters. TMA loads rows and weights and stores the padded output, which overlaps with the loads of the next tile: one
loop over tiles and depth.

    R rows   P padded rows   E experts   K inner size   N output size
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from patchgen.kernels.moe.plan import BLOCK_M, VARYING, LowRankTerm, Plan, describe_tile
from patchgen.kernels.moe.schedule import ROWS, multiply, num_programs


def grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    k_is_last: bool,
    is_padded: bool,
    added: LowRankTerm | None = None,
) -> Tensor:
    """`[P, N]`, padded; unused tiles are not written. Padding rows are undefined, but zero where those of `[P, K]` are zero and
    neither `bias` nor `added` is given.

    Args:
        rows: `[R, K]`, or `[P, K]` if `is_padded` (see `plan`).
        weight: `[E, N, K]` if `k_is_last`, else `[E, K, N]`.
        bias: `[E, N]` or None.
        added: a low-rank product to add, or None.
    """
    weight = weight.contiguous()
    inner = rows.shape[1]
    out_size = weight.shape[1 if k_is_last else 2]
    out = torch.empty(plan.num_padded, out_size, dtype=rows.dtype, device=rows.device)
    blocks = ROWS
    _grouped_gemm[(num_programs(rows, blocks.per_sm),)](
        TensorDescriptor.from_tensor(rows, [BLOCK_M, blocks.k]),
        TensorDescriptor.from_tensor(weight, [1, blocks.n, blocks.k] if k_is_last else [1, blocks.k, blocks.n]),
        bias,
        TensorDescriptor.from_tensor(out, [BLOCK_M, blocks.n]),
        None if added is None else added.rows_of_tile(BLOCK_M),
        None if added is None else added.columns_of_tile(blocks.n),
        plan.tile_start,
        plan.tiles,
        plan.num_experts,
        plan.tiles.shape[1],
        K=inner,
        N=out_size,
        K_IS_LAST=k_is_last,
        IS_PADDED=is_padded,
        RANK=0 if added is None else added.rank,
        STEP=1 if added is None else added.step,
        R_IS_LAST=added is not None and added.r_is_last,
        BLOCK_M=BLOCK_M,
        BLOCK_N=blocks.n,
        BLOCK_K=blocks.k,
        GROUP=blocks.group,
        num_warps=blocks.warps,
        num_stages=blocks.stages - (added is not None and added.step > 16),
        maxnreg=blocks.max_registers,
    )
    return out


@triton.jit(do_not_specialize=VARYING)
def _grouped_gemm(
    rows,
    weight,
    bias,
    out,
    added_rows,
    added_weight,
    tile_start,
    tiles,
    num_experts,
    num_tiles,
    K: tl.constexpr,
    N: tl.constexpr,
    K_IS_LAST: tl.constexpr,
    IS_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    R_IS_LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_m = tl.load(tile_start + num_experts)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=RANK <= STEP):
        m, n, expert, first, _ = describe_tile(index, num_m, num_n, tiles, num_tiles, GROUP)
        source = m * BLOCK_M if IS_PADDED else first
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a = rows.load([source, k])
            if K_IS_LAST:
                b = weight.load([expert, n * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K)
                acc = multiply(a, b.T, acc)
            else:
                b = weight.load([expert, k, n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
                acc = multiply(a, b, acc)
        if RANK <= STEP:
            for r in tl.static_range(0, RANK, STEP):
                acc = _add_step(added_rows, added_weight, m * BLOCK_M, expert, n * BLOCK_N, r, acc, STEP, R_IS_LAST)
        else:  # not unrolled: each step would have its own shared memory
            for r in tl.range(0, RANK, STEP, num_stages=1):
                acc = _add_step(added_rows, added_weight, m * BLOCK_M, expert, n * BLOCK_N, r, acc, STEP, R_IS_LAST)
        if bias is not None:
            column = n * BLOCK_N + tl.arange(0, BLOCK_N)
            acc += tl.load(bias + expert * N + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        out.store([m * BLOCK_M, n * BLOCK_N], acc.to(out.dtype))


@triton.jit
def _add_step(added_rows, added_weight, row, expert, column, r, acc, STEP: tl.constexpr, R_IS_LAST: tl.constexpr):
    """One step of the low-rank product, added to `acc`."""
    num_columns: tl.constexpr = acc.shape[1]
    thin = added_rows.load([row, r])
    if R_IS_LAST:
        weight = added_weight.load([expert, column, r]).reshape(num_columns, STEP)
        return multiply(thin, weight.T, acc)
    return multiply(thin, added_weight.load([expert, r, column]).reshape(STEP, num_columns), acc)
