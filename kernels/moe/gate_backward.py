"""The gradient through the second half and the gate, in one grouped product.

    g[r]  = grad_out[token of r] @ down[e]             never stored
    dw[r] = <g[r], a[r]>                               the routing weight's gradient, fp32, one sum per column tile
    dh[r] = w[r] * g[r] * gate'(h[r])                  gradient of the first projection, padded
    s[r]  = w[r] * a[r]                                what the gradient of `down` is multiplied with, padded

`g` is rounded to the dtype of the tokens, as a product's output would be: half the registers, which lets sixteen warps
share the epilogue. `a` is recomputed from `h`. The unweighted output is not needed, because `<grad, down a> = <down^T grad, a>`.

    T tokens   K slots per token   R rows   P padded rows   H hidden size   I expert intermediate size   E experts   r rank
    W = 2I with a gate, I without
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
from patchgen.kernels.moe.schedule import GATE_BACKWARD, multiply, num_programs, row_tiles_per_group
from patchgen.kernels.moe.triton_gate import activate_with_derivative, gate_backward, gate_constants


def gate_backward_gemm(
    grad_out: Tensor,
    copied: Tensor | None,
    down_proj: Tensor,
    kept: Tensor,
    top_k_weights: Tensor,
    plan: Plan,
    activation: Activation,
    is_transposed: bool,
    is_interleaved: bool,
    added: LowRankTerm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dh [P, W], s [P, I], dw [N, P])`; dw in fp32, to be summed over its N column tiles.

    Args:
        grad_out: `[T, H]`, gathered by row.
        copied: `[P, H]`, the same in the order of the padded rows, read by TMA instead; or None.
        down_proj: `[E, H, I]`, or `[E, I, H]` if `is_transposed`.
        kept: `[R, W]`, the first projection of the forward.
        top_k_weights: `[T, K]`.
        added: a low-rank product that is added to `g`, its weight `[E, r, I]`; or None.
    """
    down_proj = down_proj.contiguous()
    hidden_size, inner, width = grad_out.shape[1], down_proj.shape[1 if is_transposed else 2], kept.shape[1]
    padded, num_tiles = plan.num_padded, triton.cdiv(inner, GATE_BACKWARD.n)
    grad_kept, weighted = (grad_out.new_empty(padded, size) for size in (width, inner))
    partial = grad_out.new_empty(num_tiles, padded, dtype=torch.float32)
    rank, step = (0, 1) if added is None else (added.rank, added.step)
    top_k, is_gated, group = top_k_weights.shape[1], activation.is_gated, row_tiles_per_group(GATE_BACKWARD, num_tiles)
    config = KernelConfig(
        hidden_size, inner, width, top_k, is_gated, is_transposed, is_gated and is_interleaved, rank, step, group
    )
    box = [1, config.block_n, config.block_k] if is_transposed else [1, config.block_k, config.block_n]
    _gate_backward_gemm[(num_programs(grad_out, GATE_BACKWARD.per_sm),)](
        grad_out if copied is None else None,
        *_copied_rows(copied),
        TensorDescriptor.from_tensor(down_proj, box),
        *_low_rank_factors(added),
        kept,
        top_k_weights,
        grad_kept,
        weighted,
        partial,
        plan.slot_of_padded,
        plan.tile_start,
        plan.tiles,
        padded,
        plan.num_experts,
        plan.tiles.shape[1],
        CONFIG=config,
        num_warps=GATE_BACKWARD.warps,
        num_stages=GATE_BACKWARD.stages,
        maxnreg=GATE_BACKWARD.max_registers,
        **gate_constants(activation),
    )
    return grad_kept, weighted, partial


class KernelConfig(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        is_interleaved: whether there is a gate whose columns alternate with those of up.
        rank, step: of the low-rank product that is added, 0 and 1 without; see `plan.LowRankTerm`.
        pieces: of a tile's columns, finished one after the other.
    """

    h: int
    inner: int
    width: int
    top_k: int
    is_gated: bool
    is_transposed: bool
    is_interleaved: bool
    rank: int
    step: int
    group: int
    block_m: int = BLOCK_M
    block_n: int = GATE_BACKWARD.n
    block_k: int = GATE_BACKWARD.k
    pieces: int = GATE_BACKWARD.pieces


def _copied_rows(copied: Tensor | None) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """For copies of the rows of a whole tile, and of half a one."""
    if copied is None:
        return None, None
    whole, half = (TensorDescriptor.from_tensor(copied, [rows, GATE_BACKWARD.k]) for rows in (BLOCK_M, BLOCK_M // 2))
    return whole, half


def _low_rank_factors(
    added: LowRankTerm | None,
) -> tuple[TensorDescriptor | None, TensorDescriptor | None, TensorDescriptor | None]:
    """For copies of the left factor, for a whole tile and half a one, and of the right factor."""
    if added is None:
        return None, None, None
    return added.rows_of_tile(BLOCK_M), added.rows_of_tile(BLOCK_M // 2), added.columns_of_tile(GATE_BACKWARD.n)


@triton.jit(do_not_specialize=VARYING)
def _gate_backward_gemm(
    grad_out,
    copied,
    copied_half,
    weight,
    added_rows,
    added_half,
    added_weight,
    kept,
    top_k_weights,
    grad_kept,
    weighted,
    partial,
    slot_of_padded,
    tile_start,
    tiles,
    num_padded,
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
    gate: tl.constexpr = (GATE_KIND, GATE_ALPHA, GATE_LIMIT, GATE_SHIFT, GATE_LIMIT_AFTER)
    num_m = tl.load(tile_start + num_experts)
    num_n: tl.constexpr = (CONFIG.inner + CONFIG.block_n - 1) // CONFIG.block_n
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
            _gate_backward_tile(
                grad_out, copied, weight, added_rows, added_weight, kept, top_k_weights, grad_kept, weighted, partial,
                slot, num_padded, m * BLOCK_M, n, expert, first, end, BLOCK_M, CONFIG, gate,
            )  # fmt: skip
        else:  # the unwritten half does no harm: weight gradients read blocks of HALF rows, `grouped_gemm` makes padding of it
            _gate_backward_tile(
                grad_out, copied_half, weight, added_half, added_weight, kept, top_k_weights, grad_kept, weighted, partial,
                slot_of_half, num_padded, m * BLOCK_M, n, expert, first, end, HALF, CONFIG, gate,
            )  # fmt: skip
        m, n, expert, first, end = next_m, next_n, next_expert, next_first, next_end
        slot, slot_of_half = next_slot, next_slot_of_half


@triton.jit
def _gate_backward_tile(
    grad_out,
    copied,
    weight,
    added_rows,
    added_weight,
    kept,
    top_k_weights,
    grad_kept,
    weighted,
    partial,
    slot,
    num_padded,
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
    acc = _multiply_tile(
        grad_out, copied, weight, added_rows, added_weight, slot, first_padded, n, expert, ROWS, CONFIG
    )
    valid = row < end
    # A weight of zero makes the padding rows zero in what is stored; in the sums, that they are loaded as 0 and act(0) = 0.
    routing = tl.where(valid, tl.load(top_k_weights + slot).to(tl.float32), 0.0)[:, None]
    padded_row = first_padded + tl.arange(0, ROWS)
    target_row = padded_row.to(tl.int64)[:, None]
    source = kept + row.to(tl.int64)[:, None] * CONFIG.width
    sums = tl.zeros([ROWS], dtype=tl.float32)
    # The epilogue holds four values per column: in pieces they stay in registers. The next piece is read before
    # the last one is stored, because loads do not pass stores.
    PIECES: tl.constexpr = CONFIG.pieces
    SPAN: tl.constexpr = CONFIG.block_n // PIECES
    pieces = _in_pieces(acc.to(kept.dtype.element_ty), ROWS, CONFIG)
    projected = _read_kept(source, valid, n * CONFIG.block_n, SPAN, CONFIG)
    for piece in tl.static_range(PIECES):
        first_column = n * CONFIG.block_n + piece * SPAN
        gate, up = projected
        if piece + 1 < PIECES:
            projected = _read_kept(source, valid, first_column + SPAN, SPAN, CONFIG)
        sums = _finish_piece(
            pieces[piece], gate, up, routing, sums, grad_kept, weighted, target_row, first_column, ROWS, SPAN, CONFIG, GATE
        )  # fmt: skip
    tl.store(partial + n * num_padded + padded_row, sums)


@triton.jit
def _multiply_tile(
    grad_out,
    copied,
    weight,
    added_rows,
    added_weight,
    slot,
    first_padded,
    n,
    expert,
    ROWS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """`g` of a tile in fp32, with the low-rank product if there is one."""
    H: tl.constexpr = CONFIG.h
    RANK: tl.constexpr = CONFIG.rank
    STEP: tl.constexpr = CONFIG.step
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_K: tl.constexpr = CONFIG.block_k
    if copied is None:
        pointers = grad_out + (slot // CONFIG.top_k).to(tl.int64)[:, None] * H + tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for k in range(0, H, BLOCK_K):
        if copied is not None:
            rows = copied.load([first_padded, k])
        elif H % BLOCK_K == 0:
            rows = tl.load(pointers + k)
        else:
            rows = tl.load(pointers + k, mask=(k + tl.arange(0, BLOCK_K) < H)[None, :], other=0.0)
        if CONFIG.is_transposed:
            acc = multiply(rows, weight.load([expert, n * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T, acc)
        else:
            acc = multiply(rows, weight.load([expert, k, n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N), acc)
    for r in tl.static_range(0, RANK, STEP):
        thin = added_weight.load([expert, r, n * BLOCK_N]).reshape(STEP, BLOCK_N)
        acc = multiply(added_rows.load([first_padded, r]), thin, acc)
    return acc


@triton.jit
def _in_pieces(acc, ROWS: tl.constexpr, CONFIG: tl.constexpr):
    """The columns of a tile in `CONFIG.pieces` groups, from left to right: 2, 4 or 8."""
    BLOCK_N: tl.constexpr = CONFIG.block_n
    pieces = _halves(acc, ROWS, BLOCK_N)
    if CONFIG.pieces >= 4:
        pieces = _halves(pieces[0], ROWS, BLOCK_N // 2) + _halves(pieces[1], ROWS, BLOCK_N // 2)
    if CONFIG.pieces == 8:
        left = _halves(pieces[0], ROWS, BLOCK_N // 4) + _halves(pieces[1], ROWS, BLOCK_N // 4)
        right = _halves(pieces[2], ROWS, BLOCK_N // 4) + _halves(pieces[3], ROWS, BLOCK_N // 4)
        pieces = left + right
    return pieces


@triton.jit
def _halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right columns of a tile; both stay in the registers they are in."""
    return acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


@triton.jit
def _finish_piece(
    grad,
    gate,
    up,
    routing,
    sums,
    grad_kept,
    weighted,
    row,
    first_column,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    CONFIG: tl.constexpr,
    GATE: tl.constexpr,
):
    """Stores `dh` and `s` of some columns of `g`, `grad`; returns `sums` with their products of `g` and `a`."""
    grad = grad.to(tl.float32)
    if CONFIG.is_gated:
        value, by_gate, by_up = gate_backward(
            gate.to(tl.float32), up.to(tl.float32), GATE[0], GATE[1], GATE[2], GATE[3], GATE[4]
        )
    else:
        value, by_gate = activate_with_derivative(gate.to(tl.float32), GATE[0], GATE[1])
        by_up = value
    # Columns past the end have a gradient of zero: their weights were read as zeros.
    sums += tl.sum(grad * value, 1)
    grad *= routing
    column = first_column + tl.arange(0, SPAN)
    _store_gradient(grad_kept + row * CONFIG.width, grad * by_gate, grad * by_up, first_column, ROWS, SPAN, CONFIG)
    tl.store(
        weighted + row * CONFIG.inner + column[None, :],
        (routing * value).to(weighted.dtype.element_ty),
        mask=(column < CONFIG.inner)[None, :],
    )
    return sums


@triton.jit
def _read_kept(source, valid, first_column, SPAN: tl.constexpr, CONFIG: tl.constexpr):
    """Gate and up of `SPAN` columns; twice the projection itself where there is no gate.

    What is read here and written by `_store_gradient` is larger than the cache and not wanted again in this kernel: evicted
    first (but not if interleaved), it leaves the cache to the operands (0.973 to 0.948 ms at Qwen3's shape).
    """
    INNER: tl.constexpr = CONFIG.inner
    column = first_column + tl.arange(0, SPAN)
    mask = valid[:, None] & (column < INNER)[None, :]
    if CONFIG.is_interleaved:
        both = 2 * first_column + tl.arange(0, 2 * SPAN)
        pairs = tl.load(source + both[None, :], mask=valid[:, None] & (both < CONFIG.width)[None, :], other=0.0)
        gate, up = pairs.reshape(source.shape[0], SPAN, 2).split()
    else:
        gate = tl.load(source + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        up = gate
        if CONFIG.is_gated:
            up = tl.load(source + INNER + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    return gate, up


@triton.jit
def _store_gradient(
    target, grad_gate, grad_up, first_column, ROWS: tl.constexpr, SPAN: tl.constexpr, CONFIG: tl.constexpr
):
    """Writes the gradient of `SPAN` columns in the layout of the projection."""
    INNER: tl.constexpr = CONFIG.inner
    column = first_column + tl.arange(0, SPAN)
    mask = (column < INNER)[None, :]
    dtype: tl.constexpr = target.dtype.element_ty
    if CONFIG.is_interleaved:
        both = 2 * first_column + tl.arange(0, 2 * SPAN)
        grads = tl.join(grad_gate.to(dtype), grad_up.to(dtype)).reshape(ROWS, 2 * SPAN)
        tl.store(target + both[None, :], grads, mask=(both < CONFIG.width)[None, :])
    else:
        tl.store(target + column[None, :], grad_gate.to(dtype), mask=mask, eviction_policy="evict_first")
        if CONFIG.is_gated:
            tl.store(target + INNER + column[None, :], grad_up.to(dtype), mask=mask, eviction_policy="evict_first")
