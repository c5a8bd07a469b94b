"""A copy of the tokens in the order of the padded rows, for weight gradients that it makes faster.

Each token is read once and written to its K rows. Floor: T * H read, R * H written, at the speed of memory.

    T tokens   K slots per token   R = T * K rows   H hidden size   P padded rows
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchgen.kernels.moe.plan import BLOCK_M, VARYING, Plan


def pad_rows(tokens: Tensor, top_k: int, plan: Plan) -> Tensor:
    """`[P, H]` from `tokens [T, H]`: each expert's rows, zeros in the padding; unused tiles are not written."""
    num_tokens, hidden_size = tokens.shape
    out = torch.empty(plan.num_padded, hidden_size, dtype=tokens.dtype, device=tokens.device)
    block = min(triton.next_power_of_2(hidden_size), 1024)
    num_tiles = plan.tiles.shape[1]
    _pad_rows[(num_tokens + num_tiles, triton.cdiv(hidden_size, block))](
        tokens,
        plan.padded_of_slot,
        plan.tile_start,
        plan.tiles,
        out,
        num_tokens,
        num_tiles,
        plan.num_experts,
        H=hidden_size,
        TOP_K=top_k,
        TILE_ROWS=BLOCK_M,
        BLOCK_H=block,
        num_warps=max(1, block // 256),
    )
    return out


@triton.jit(do_not_specialize=VARYING)
def _pad_rows(
    tokens,
    padded_of_slot,
    tile_start,
    tiles,
    out,
    num_tokens,
    num_tiles,
    num_experts,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_bounds = column < H
    if program < num_tokens:
        value = tl.load(tokens + program.to(tl.int64) * H + column, mask=in_bounds, other=0.0)
        for k in tl.static_range(TOP_K):
            row = tl.load(padded_of_slot + program * TOP_K + k)
            if row >= 0:
                tl.store(out + row.to(tl.int64) * H + column, value, mask=in_bounds)
    else:
        tile = program - num_tokens
        if tile < tl.load(tile_start + num_experts):
            num_rows = tl.load(tiles + 2 * num_tiles + tile) - tl.load(tiles + num_tiles + tile)
            for row in range(num_rows, TILE_ROWS):
                target = out + (tile * TILE_ROWS + row).to(tl.int64) * H + column
                tl.store(target, tl.zeros([BLOCK_H], dtype=out.dtype.element_ty), mask=in_bounds)
