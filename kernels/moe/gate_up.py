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

from typing import NamedTuple

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
        and _is_specialized_for(hidden_states.shape[1], is_transposed, halves)
    ):
        from patchgen.kernels.moe.gate_up_specialized import specialized_gate_up  # needs Gluon

        specialized_gate_up(
            hidden_states, gate_up_proj, bias, kept, gated, plan, top_k, activation, is_transposed, halves, keep
        )
        return kept, gated
    _launch(
        hidden_states, gate_up_proj, bias, kept, gated, plan, top_k, activation, is_transposed, halves, keep, added
    )
    return kept, gated


def _is_specialized_for(hidden_size: int, is_transposed: bool, halves: int) -> bool:
    """Whether one copy brings a tile's columns in a layout that products read, which two ranges of a transposed weight
    are not, and tiles are more than one step deep: the compiler fails on a loop of one step."""
    return not (is_transposed and halves == 2) and hidden_size > GATE_UP_SPECIALIZED.k


class KernelConfig(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        halves: 2 where a tile's columns are two ranges of the weight, gate and up; else 1.
        rank, step: of the low-rank product that is added, 0 and 1 without; see `plan.LowRankTerm`.
    """

    h: int
    width: int
    top_k: int
    halves: int
    is_gated: bool
    is_transposed: bool
    keep: bool
    rank: int
    step: int
    group: int
    block_m: int = BLOCK_M
    block_n: int = GATE_UP.n
    block_k: int = GATE_UP.k


def _launch(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    bias: Tensor | None,
    kept: Tensor,
    gated: Tensor,
    plan: Plan,
    top_k: int,
    activation: Activation,
    is_transposed: bool,
    halves: int,
    keep: bool,
    added: LowRankTerm | None,
) -> None:
    """Writes `kept`, if `keep`, and `gated`; `halves` as in `KernelConfig`, the others as in `gate_up`."""
    hidden_size, width = hidden_states.shape[1], kept.shape[1]
    rank, step = (0, 1) if added is None else (added.rank, added.step)
    group = row_tiles_per_group(GATE_UP, triton.cdiv(width, GATE_UP.n))
    config = KernelConfig(
        hidden_size, width, top_k, halves, activation.is_gated, is_transposed, keep, rank, step, group
    )
    _gate_up[(num_programs(hidden_states, GATE_UP.per_sm),)](
        hidden_states,
        _weight_descriptor(gate_up_proj, halves, is_transposed, config.block_n, config.block_k),
        bias,
        kept,
        gated,
        None if added is None else added.rows_of_tile(BLOCK_M),
        None if added is None else added.rows_of_tile(BLOCK_M // 2),
        None if added is None else _weight_descriptor(added.weight, halves, False, config.block_n, step),
        plan.slot_of_padded,
        plan.tile_start,
        plan.tiles,
        plan.num_experts,
        plan.tiles.shape[1],
        CONFIG=config,
        num_warps=GATE_UP.warps,
        num_stages=GATE_UP.stages,
        maxnreg=GATE_UP.max_registers,
        **gate_constants(activation),
    )


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
    CONFIG: tl.constexpr,
    GATE_KIND: tl.constexpr,
    GATE_ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    GATE_SHIFT: tl.constexpr,
    GATE_LIMIT_AFTER: tl.constexpr,
):
    BLOCK_M: tl.constexpr = CONFIG.block_m
    HALF: tl.constexpr = BLOCK_M // 2
    SPAN: tl.constexpr = CONFIG.block_n // CONFIG.halves
    gate: tl.constexpr = (GATE_KIND, GATE_ALPHA, GATE_LIMIT, GATE_SHIFT, GATE_LIMIT_AFTER)
    num_m = tl.load(tile_start + num_experts)
    num_n: tl.constexpr = (CONFIG.width // CONFIG.halves + SPAN - 1) // SPAN
    start = tl.program_id(0)
    m, n, expert, first, end = describe_tile(start, num_m, num_n, tiles, num_tiles, CONFIG.group)
    slot = tl.load(slot_of_padded + m * BLOCK_M + tl.arange(0, BLOCK_M))
    slot_of_half = tl.load(slot_of_padded + m * BLOCK_M + tl.arange(0, HALF))
    for index in tl.range(start, num_m * num_n, tl.num_programs(0)):
        # The next tile's rows and expert are prefetched while this tile is computed.
        next_m, next_n, next_expert, next_first, next_end = describe_tile(
            index + tl.num_programs(0), num_m, num_n, tiles, num_tiles, CONFIG.group
        )
        next_slot = tl.load(slot_of_padded + next_m * BLOCK_M + tl.arange(0, BLOCK_M))
        next_slot_of_half = tl.load(slot_of_padded + next_m * BLOCK_M + tl.arange(0, HALF))
        if end - first > HALF:
            _gate_up_tile(
                x, weight, bias, kept, gated, added_rows, added_weight, slot, m * BLOCK_M, n, expert, first, end,
                BLOCK_M, CONFIG, gate,
            )  # fmt: skip
        else:
            _gate_up_tile(
                x, weight, bias, kept, gated, added_half, added_weight, slot_of_half, m * BLOCK_M, n, expert, first, end,
                HALF, CONFIG, gate,
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
    ROWS: tl.constexpr,
    CONFIG: tl.constexpr,
    GATE: tl.constexpr,
):
    """One tile of `ROWS` rows; an expert's last one may have half as many."""
    row = first + tl.arange(0, ROWS)
    acc = _multiply_tile(x, weight, added_rows, added_weight, slot, first_padded, n, expert, ROWS, CONFIG)
    valid = (row < end)[:, None]
    wide_row = row.to(tl.int64)[:, None]
    if CONFIG.halves == 2:
        _finish_halves(acc, bias, kept, gated, wide_row, valid, n, expert, ROWS, CONFIG, GATE)
    else:
        _finish_columns(acc, bias, kept, gated, wide_row, valid, n, expert, ROWS, CONFIG, GATE)


@triton.jit
def _multiply_tile(
    x, weight, added_rows, added_weight, slot, first_padded, n, expert, ROWS: tl.constexpr, CONFIG: tl.constexpr
):
    """The sums of a tile, before the bias, with the low-rank product if there is one."""
    H: tl.constexpr = CONFIG.h
    HALVES: tl.constexpr = CONFIG.halves
    RANK: tl.constexpr = CONFIG.rank
    STEP: tl.constexpr = CONFIG.step
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_K: tl.constexpr = CONFIG.block_k
    SPAN: tl.constexpr = BLOCK_N // HALVES  # columns of the weight that follow each other in a tile
    # Rows past the end repeat the last one: they are computed and not stored.
    pointers = x + (slot // CONFIG.top_k).to(tl.int64)[:, None] * H + tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for k in range(0, H, BLOCK_K):
        if H % BLOCK_K == 0:
            rows = tl.load(pointers + k)
        else:
            rows = tl.load(pointers + k, mask=(k + tl.arange(0, BLOCK_K) < H)[None, :], other=0.0)
        if CONFIG.is_transposed:
            columns = weight.load([expert, k, 0, n * SPAN]).reshape(BLOCK_K, BLOCK_N)
            acc = multiply(rows, columns, acc)
        else:
            columns = weight.load([expert * HALVES, n * SPAN, k]).reshape(BLOCK_N, BLOCK_K)
            acc = multiply(rows, columns.T, acc)
    for r in tl.static_range(0, RANK, STEP):
        thin = added_weight.load([expert * HALVES, n * SPAN, r]).reshape(BLOCK_N, STEP)
        acc = multiply(added_rows.load([first_padded, r]), thin.T, acc)
    return acc


@triton.jit
def _finish_halves(
    acc, bias, kept, gated, row, valid, n, expert, ROWS: tl.constexpr, CONFIG: tl.constexpr, GATE: tl.constexpr
):
    """Bias, gate and stores of a tile with the gate in its left and the up columns in its right half."""
    SPAN: tl.constexpr = CONFIG.block_n // 2
    WIDTH: tl.constexpr = CONFIG.width
    INNER: tl.constexpr = WIDTH // 2
    dtype: tl.constexpr = gated.dtype.element_ty
    gate, up = acc.reshape(ROWS, 2, SPAN).permute(0, 2, 1).split()
    column = n * SPAN + tl.arange(0, SPAN)
    in_bounds = column < INNER
    if bias is not None:
        gate_bias = bias + expert * WIDTH + column
        gate += tl.load(gate_bias, mask=in_bounds, other=0.0).to(tl.float32)[None, :]
        up += tl.load(gate_bias + INNER, mask=in_bounds, other=0.0).to(tl.float32)[None, :]
    mask = valid & in_bounds[None, :]
    gate = gate.to(dtype)
    up = up.to(dtype)
    if CONFIG.keep:
        tl.store(kept + row * WIDTH + column[None, :], gate, mask=mask)
        tl.store(kept + row * WIDTH + INNER + column[None, :], up, mask=mask)
    out = gate_forward(gate.to(tl.float32), up.to(tl.float32), GATE[0], GATE[1], GATE[2], GATE[3], GATE[4])
    tl.store(gated + row * INNER + column[None, :], out.to(dtype), mask=mask)


@triton.jit
def _finish_columns(
    acc, bias, kept, gated, row, valid, n, expert, ROWS: tl.constexpr, CONFIG: tl.constexpr, GATE: tl.constexpr
):
    """Bias, gate and stores of a tile whose gate and up columns alternate, or that has no gate."""
    BLOCK_N: tl.constexpr = CONFIG.block_n
    WIDTH: tl.constexpr = CONFIG.width
    dtype: tl.constexpr = gated.dtype.element_ty
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_bounds = column < WIDTH
    if bias is not None:
        acc += tl.load(bias + expert * WIDTH + column, mask=in_bounds, other=0.0).to(tl.float32)[None, :]
    projected = acc.to(dtype)
    if CONFIG.keep:
        tl.store(kept + row * WIDTH + column[None, :], projected, mask=valid & in_bounds[None, :])
    if CONFIG.is_gated:
        gate, up = projected.reshape(ROWS, BLOCK_N // 2, 2).split()
        half = n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out = gate_forward(gate.to(tl.float32), up.to(tl.float32), GATE[0], GATE[1], GATE[2], GATE[3], GATE[4])
        mask = valid & (half < WIDTH // 2)[None, :]
        tl.store(gated + row * (WIDTH // 2) + half[None, :], out.to(dtype), mask=mask)
    else:
        out = activate(projected.to(tl.float32), GATE[0], GATE[1])
        tl.store(gated + row * WIDTH + column[None, :], out.to(dtype), mask=valid & in_bounds[None, :])
