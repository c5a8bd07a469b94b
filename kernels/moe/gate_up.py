"""The first half of the experts: gathered rows times `gate_up`, with the gate in the epilogue.

    h[r] = x[token of r] @ gate_up[e]^T (+ bias)      kept for the backward
    a[r] = gate(h[r])                                 the input of the second half

The rows of x are read through their row numbers by the copy into shared memory; a permuted copy of x never exists. A
tile holds the gate and the up columns of the same outputs side by side in one accumulator, so the gate is elementwise
in registers. Where `is_specialized_here` and `_is_specialized_for` hold and nothing is added, `gate_up_specialized` computes
the same bits in less time.

    T tokens   R rows   H hidden size   I expert intermediate size   E experts   W = 2I with a gate, I without   r rank
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from patchgen.kernels.elementwise.activations import Activation
from patchgen.kernels.moe.plan import BLOCK_M, VARYING, LowRankTerm, Plan, describe_tile
from patchgen.kernels.moe.schedule import (
    GATE_UP,
    GATE_UP_SPECIALIZED,
    is_specialized_here,
    multiply,
    num_programs,
    row_tiles_per_group,
)
from patchgen.kernels.moe.triton_gate import activate, gate_constants, gate_forward


def gate_up(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    bias: Tensor | None,
    plan: Plan,
    top_k: int,
    activation: Activation,
    is_transposed: bool,
    is_interleaved: bool,
    max_rows: int,
    keep: bool,
    added: LowRankTerm | None = None,
) -> tuple[Tensor, Tensor]:
    """`(h, a)`: `[R, W]` (empty unless `keep`) and `[R, I]`, compact; rows that are left out are not written.

    Args:
        max_rows: R, which the plan was made with.
        hidden_states: `[T, H]`.
        gate_up_proj: `[E, W, H]`, or `[E, H, W]` if `is_transposed`.
        bias: `[E, W]` or None.
        added: a low-rank product that is added to `h`, its weight `[E, W, r]`; or None.
    """
    hidden_size = hidden_states.shape[1]
    width = gate_up_proj.shape[2 if is_transposed else 1]
    inner = width // 2 if activation.is_gated else width
    new = {"dtype": hidden_states.dtype, "device": hidden_states.device}
    kept = torch.empty(max_rows if keep else 0, width, **new)
    gated = torch.empty(max_rows, inner, **new)
    # In the concatenated layout the columns of a tile are two ranges of the weight, `I` apart.
    halves = 2 if activation.is_gated and not is_interleaved else 1
    if (
        added is None
        and is_specialized_here(hidden_states)
        and _is_specialized_for(hidden_size, is_transposed, halves)
    ):
        from patchgen.kernels.moe.gate_up_specialized import specialized_gate_up  # needs Gluon

        specialized_gate_up(
            hidden_states, gate_up_proj, bias, kept, gated, plan, top_k, activation, is_transposed, halves, keep
        )
        return kept, gated
    blocks = GATE_UP
    _gate_up[(num_programs(hidden_states, blocks.per_sm),)](
        hidden_states,
        _weight_descriptor(gate_up_proj, halves, is_transposed, blocks.n, blocks.k),
        bias,
        kept,
        gated,
        None if added is None else added.rows_of_tile(BLOCK_M),
        None if added is None else added.rows_of_tile(BLOCK_M // 2),
        None if added is None else _weight_descriptor(added.weight, halves, False, blocks.n, added.step),
        plan.slot_of_padded,
        plan.tile_start,
        plan.tiles,
        plan.num_experts,
        plan.tiles.shape[1],
        H=hidden_size,
        WIDTH=width,
        TOP_K=top_k,
        HALVES=halves,
        IS_GATED=activation.is_gated,
        IS_TRANSPOSED=is_transposed,
        KEEP=keep,
        RANK=0 if added is None else added.rank,
        STEP=1 if added is None else added.step,
        BLOCK_M=BLOCK_M,
        BLOCK_N=blocks.n,
        BLOCK_K=blocks.k,
        GROUP=row_tiles_per_group(blocks, triton.cdiv(width, blocks.n)),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        maxnreg=blocks.max_registers,
        **gate_constants(activation),
    )
    return kept, gated


def _is_specialized_for(hidden_size: int, is_transposed: bool, halves: int) -> bool:
    """Whether one copy brings a tile's columns in a layout that products read, which two ranges of a transposed weight
    are not, and tiles are more than one step deep: the compiler fails on a loop of one step."""
    return not (is_transposed and halves == 2) and hidden_size > GATE_UP_SPECIALIZED.k


def _weight_descriptor(
    weight: Tensor, halves: int, is_transposed: bool, block_n: int, block_k: int
) -> TensorDescriptor:
    weight = weight.contiguous()
    if is_transposed:
        num_experts, hidden_size, width = weight.shape
        view = weight.view(num_experts, hidden_size, halves, width // halves)
        return TensorDescriptor.from_tensor(view, [1, block_k, halves, block_n // halves])
    num_experts, width, hidden_size = weight.shape
    view = weight.view(num_experts * halves, width // halves, hidden_size)
    return TensorDescriptor.from_tensor(view, [halves, block_n // halves, block_k])


@triton.jit(do_not_specialize=VARYING)
def _gate_up(
    x,
    weight,
    bias,
    kept,
    gated,
    added_rows,
    added_half,
    added_weight,
    slot_of_padded,
    tile_start,
    tiles,
    num_experts,
    num_tiles,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    HALVES: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    KEEP: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    GATE_KIND: tl.constexpr,
    GATE_ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    GATE_SHIFT: tl.constexpr,
    GATE_LIMIT_AFTER: tl.constexpr,
):
    num_m = tl.load(tile_start + num_experts)
    num_n: tl.constexpr = (WIDTH // HALVES + BLOCK_N // HALVES - 1) // (BLOCK_N // HALVES)
    HALF: tl.constexpr = BLOCK_M // 2
    start = tl.program_id(0)
    m, n, expert, first, end = describe_tile(start, num_m, num_n, tiles, num_tiles, GROUP)
    slot = tl.load(slot_of_padded + m * BLOCK_M + tl.arange(0, BLOCK_M))
    slot_of_half = tl.load(slot_of_padded + m * BLOCK_M + tl.arange(0, HALF))
    for index in tl.range(start, num_m * num_n, tl.num_programs(0)):
        # The next tile's rows and expert are prefetched while this tile is computed.
        next_m, next_n, next_expert, next_first, next_end = describe_tile(
            index + tl.num_programs(0), num_m, num_n, tiles, num_tiles, GROUP
        )
        next_slot = tl.load(slot_of_padded + next_m * BLOCK_M + tl.arange(0, BLOCK_M))
        next_slot_of_half = tl.load(slot_of_padded + next_m * BLOCK_M + tl.arange(0, HALF))
        if end - first > HALF:
            _gate_up_tile(
                x, weight, bias, kept, gated, added_rows, added_weight, slot, m * BLOCK_M, n, expert, first, end,
                H, WIDTH, TOP_K, HALVES, IS_GATED, IS_TRANSPOSED, KEEP, RANK, STEP, BLOCK_M, BLOCK_N, BLOCK_K,
                GATE_KIND, GATE_ALPHA, GATE_LIMIT, GATE_SHIFT, GATE_LIMIT_AFTER,
            )  # fmt: skip
        else:
            _gate_up_tile(
                x, weight, bias, kept, gated, added_half, added_weight, slot_of_half, m * BLOCK_M, n, expert, first, end,
                H, WIDTH, TOP_K, HALVES, IS_GATED, IS_TRANSPOSED, KEEP, RANK, STEP, HALF, BLOCK_N, BLOCK_K,
                GATE_KIND, GATE_ALPHA, GATE_LIMIT, GATE_SHIFT, GATE_LIMIT_AFTER,
            )  # fmt: skip
        m, n, expert, first, end = next_m, next_n, next_expert, next_first, next_end
        slot, slot_of_half = next_slot, next_slot_of_half


@triton.jit
def _gate_up_tile(
    x,
    weight,
    bias,
    kept,
    gated,
    added_rows,
    added_weight,
    slot,
    first_padded,
    n,
    expert,
    first,
    end,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    HALVES: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    KEEP: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATE_KIND: tl.constexpr,
    GATE_ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    GATE_SHIFT: tl.constexpr,
    GATE_LIMIT_AFTER: tl.constexpr,
):
    """One tile of `ROWS` rows; an expert's last one may have half as many."""
    SPAN: tl.constexpr = BLOCK_N // HALVES  # columns of the weight that follow each other in a tile
    row = first + tl.arange(0, ROWS)
    # Rows past the end repeat the last one: they are computed and not stored.
    pointers = x + (slot // TOP_K).to(tl.int64)[:, None] * H + tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for k in range(0, H, BLOCK_K):
        if H % BLOCK_K == 0:
            rows = tl.load(pointers + k)
        else:
            rows = tl.load(pointers + k, mask=(k + tl.arange(0, BLOCK_K) < H)[None, :], other=0.0)
        if IS_TRANSPOSED:
            columns = weight.load([expert, k, 0, n * SPAN]).reshape(BLOCK_K, BLOCK_N)
            acc = multiply(rows, columns, acc)
        else:
            columns = weight.load([expert * HALVES, n * SPAN, k]).reshape(BLOCK_N, BLOCK_K)
            acc = multiply(rows, columns.T, acc)
    for r in tl.static_range(0, RANK, STEP):
        thin = added_weight.load([expert * HALVES, n * SPAN, r]).reshape(BLOCK_N, STEP)
        acc = multiply(added_rows.load([first_padded, r]), thin.T, acc)

    valid = (row < end)[:, None]
    wide_row = row.to(tl.int64)[:, None]
    if HALVES == 2:
        gate, up = acc.reshape(ROWS, 2, SPAN).permute(0, 2, 1).split()
        column = n * SPAN + tl.arange(0, SPAN)
        in_bounds = column < WIDTH // 2
        if bias is not None:
            gate += tl.load(bias + expert * WIDTH + column, mask=in_bounds, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + expert * WIDTH + WIDTH // 2 + column, mask=in_bounds, other=0.0).to(tl.float32)[
                None, :
            ]
        mask = valid & in_bounds[None, :]
        gate = gate.to(x.dtype.element_ty)
        up = up.to(x.dtype.element_ty)
        if KEEP:
            tl.store(kept + wide_row * WIDTH + column[None, :], gate, mask=mask)
            tl.store(kept + wide_row * WIDTH + WIDTH // 2 + column[None, :], up, mask=mask)
        out = gate_forward(
            gate.to(tl.float32), up.to(tl.float32), GATE_KIND, GATE_ALPHA, GATE_LIMIT, GATE_SHIFT, GATE_LIMIT_AFTER
        )
        tl.store(gated + wide_row * (WIDTH // 2) + column[None, :], out.to(x.dtype.element_ty), mask=mask)
    else:
        column = n * BLOCK_N + tl.arange(0, BLOCK_N)
        in_bounds = column < WIDTH
        if bias is not None:
            acc += tl.load(bias + expert * WIDTH + column, mask=in_bounds, other=0.0).to(tl.float32)[None, :]
        projected = acc.to(x.dtype.element_ty)
        if KEEP:
            tl.store(kept + wide_row * WIDTH + column[None, :], projected, mask=valid & in_bounds[None, :])
        if IS_GATED:
            gate, up = projected.reshape(ROWS, BLOCK_N // 2, 2).split()
            half = n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            out = gate_forward(
                gate.to(tl.float32),
                up.to(tl.float32),
                GATE_KIND,
                GATE_ALPHA,
                GATE_LIMIT,
                GATE_SHIFT,
                GATE_LIMIT_AFTER,
            )
            mask = valid & (half < WIDTH // 2)[None, :]
            tl.store(gated + wide_row * (WIDTH // 2) + half[None, :], out.to(x.dtype.element_ty), mask=mask)
        else:
            out = activate(projected.to(tl.float32), GATE_KIND, GATE_ALPHA)
            tl.store(
                gated + wide_row * WIDTH + column[None, :],
                out.to(x.dtype.element_ty),
                mask=valid & in_bounds[None, :],
            )
