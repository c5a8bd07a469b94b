"""Grouped product over a variable number of rows: the weight gradients, `out[e] = sum over r of left[r]^T right[r]`.

One side is a padded tensor that comes by TMA. The other is gathered from the tokens by row number, so that neither
the permuted input nor the permuted output gradient exists in memory; where a copy of it in row order is repaid
(`schedule.copy_pays_off`), it comes by TMA too. The padding rows of the first side hold zeros; the gathered side
repeats a row of the same expert there, so that a token of one expert cannot reach the gradient of another, whatever it
holds. Experts without rows get zeros. The result leaves by TMA: three stages and a tile of it fill the shared memory.
Where `is_specialized_here`, `grouped_gemm_weights_specialized` computes the same bits in less time.

    T tokens   P = M * BLOCK_M padded rows   E experts   A, B columns of the gathered and of the padded side
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from patchgen.kernels.moe.plan import BLOCK_M, Plan, tile_at
from patchgen.kernels.moe.schedule import WEIGHTS, is_specialized_here, multiply, num_programs

_BLOCK_A = 128


def grouped_gemm_weights(
    tokens: Tensor, copied: Tensor | None, padded: Tensor, plan: Plan, top_k: int, tokens_first: bool
) -> Tensor:
    """The gradient of a stacked weight, in the dtype of its factors, summed in fp32.

    Args:
        tokens: `[T, A]`, gathered by row.
        copied: `[P, A]`, the same in the order of the padded rows, read by TMA instead; or None.
        padded: `[P, B]`.
        top_k: K.
        tokens_first: `[E, A, B]` is wanted; else `[E, B, A]`.
    """
    num_experts = plan.num_experts
    gathered_size, padded_size = tokens.shape[1], padded.shape[1]
    shape = (gathered_size, padded_size) if tokens_first else (padded_size, gathered_size)
    out = torch.empty(num_experts, *shape, dtype=tokens.dtype, device=tokens.device)
    if is_specialized_here(tokens):
        from patchgen.kernels.moe.grouped_gemm_weights_specialized import specialized_gemm_weights  # needs Gluon

        specialized_gemm_weights(tokens, copied, padded, out, plan, top_k, tokens_first)
        return out
    blocks = WEIGHTS
    box = [1, _BLOCK_A, blocks.n] if tokens_first else [1, blocks.n, _BLOCK_A]
    source = tokens
    if copied is not None:
        source = TensorDescriptor.from_tensor(copied, [blocks.k, _BLOCK_A])
    _grouped_gemm_weights[(num_programs(tokens, blocks.per_sm),)](
        source,
        TensorDescriptor.from_tensor(padded, [blocks.k, blocks.n]),
        TensorDescriptor.from_tensor(out, box),
        plan.slot_of_padded,
        plan.row_start,
        plan.tile_start,
        num_experts,
        plan.num_padded,
        A=gathered_size,
        B=padded_size,
        TOP_K=top_k,
        IS_COPIED=copied is not None,
        TOKENS_FIRST=tokens_first,
        TILE_ROWS=BLOCK_M,
        BLOCK_A=_BLOCK_A,
        BLOCK_B=blocks.n,
        BLOCK_R=blocks.k,
        GROUP=blocks.group,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        maxnreg=blocks.max_registers,
    )
    return out


@triton.jit
def _grouped_gemm_weights(
    tokens,
    padded,
    out,
    slot_of_padded,
    row_start,
    tile_start,
    num_experts,
    num_padded,
    A: tl.constexpr,
    B: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_COPIED: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_a: tl.constexpr = (A + BLOCK_A - 1) // BLOCK_A
    num_b: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    per_expert: tl.constexpr = num_a * num_b
    # The second half of an expert's last tile may be unwritten; see `gate_backward`.
    tl.static_assert(TILE_ROWS // 2 % BLOCK_R == 0)
    for index in tl.range(tl.program_id(0), num_experts * per_expert, tl.num_programs(0)):
        expert = index // per_expert
        a_tile, b_tile = tile_at(index % per_expert, num_a, num_b, GROUP)

        num_rows = tl.load(row_start + expert + 1) - tl.load(row_start + expert)
        source = tl.load(tile_start + expert) * TILE_ROWS
        a_column = a_tile * BLOCK_A + tl.arange(0, BLOCK_A)
        acc = tl.zeros([BLOCK_A, BLOCK_B], dtype=tl.float32)
        if IS_COPIED:
            for start in range(0, num_rows, BLOCK_R):
                left = tokens.load([source + start, a_tile * BLOCK_A])
                right = padded.load([source + start, b_tile * BLOCK_B])
                acc = multiply(left.T, right, acc)
        else:
            if A % BLOCK_A == 0:
                read_column = a_column
            else:  # columns past the end are computed, not stored: they read column 0, in 16-byte pieces
                read_column = tl.max_contiguous(tl.multiple_of(tl.where(a_column < A, a_column, 0), 8), 8)
            # The row numbers are read one step ahead of the rows they name: read in the same step, they would take
            # every second stage of the pipeline. Past the expert's rows they are of no use and only have to exist.
            numbers = source + tl.arange(0, BLOCK_R)
            slot = tl.load(slot_of_padded + numbers, mask=numbers < num_padded, other=0)
            for start in range(0, num_rows, BLOCK_R):
                token = slot // TOP_K
                numbers += BLOCK_R
                slot = tl.load(slot_of_padded + numbers, mask=numbers < num_padded, other=0)
                left = tl.load(tokens + token.to(tl.int64)[:, None] * A + read_column[None, :])
                right = padded.load([source + start, b_tile * BLOCK_B])
                acc = multiply(left.T, right, acc)

        result = acc.to(out.dtype)
        if TOKENS_FIRST:
            out.store([expert, a_tile * BLOCK_A, b_tile * BLOCK_B], result.reshape(1, BLOCK_A, BLOCK_B))
        else:
            out.store([expert, b_tile * BLOCK_B, a_tile * BLOCK_A], result.T.reshape(1, BLOCK_B, BLOCK_A))
