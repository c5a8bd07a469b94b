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
    padded = plan.num_padded
    new = {"dtype": grad_out.dtype, "device": grad_out.device}
    grad_kept = torch.empty(padded, width, **new)
    weighted = torch.empty(padded, inner, **new)
    blocks = GATE_BACKWARD
    num_tiles = triton.cdiv(inner, blocks.n)
    partial = torch.empty(num_tiles, padded, dtype=torch.float32, device=grad_out.device)
    block_shape = [1, blocks.n, blocks.k] if is_transposed else [1, blocks.k, blocks.n]
    source = whole = half = None
    if copied is None:
        source = grad_out
    else:
        whole, half = (TensorDescriptor.from_tensor(copied, [rows, blocks.k]) for rows in (BLOCK_M, BLOCK_M // 2))
    _gate_backward_gemm[(num_programs(grad_out, blocks.per_sm),)](
        source,
        whole,
        half,
        TensorDescriptor.from_tensor(down_proj, block_shape),
        None if added is None else added.rows_of_tile(BLOCK_M),
        None if added is None else added.rows_of_tile(BLOCK_M // 2),
        None if added is None else added.columns_of_tile(blocks.n),
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
        H=hidden_size,
        INNER=inner,
        WIDTH=width,
        TOP_K=top_k_weights.shape[1],
        IS_GATED=activation.is_gated,
        IS_TRANSPOSED=is_transposed,
        IS_INTERLEAVED=is_interleaved,
        RANK=0 if added is None else added.rank,
        STEP=1 if added is None else added.step,
        BLOCK_M=BLOCK_M,
        BLOCK_N=blocks.n,
        BLOCK_K=blocks.k,
        PIECES=blocks.pieces,
        GROUP=row_tiles_per_group(blocks, num_tiles),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        maxnreg=blocks.max_registers,
        **gate_constants(activation),
    )
    return grad_kept, weighted, partial


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
    H: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    GROUP: tl.constexpr,
    GATE_KIND: tl.constexpr,
    GATE_ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    GATE_SHIFT: tl.constexpr,
    GATE_LIMIT_AFTER: tl.constexpr,
):
    num_m = tl.load(tile_start + num_experts)
    num_n: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
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
            _gate_backward_tile(
                grad_out, copied, weight, added_rows, added_weight, kept, top_k_weights, grad_kept, weighted, partial,
                slot, num_padded, m * BLOCK_M, n, expert, first, end,
                H, INNER, WIDTH, TOP_K, IS_GATED, IS_TRANSPOSED, IS_INTERLEAVED, RANK, STEP, BLOCK_M, BLOCK_N, BLOCK_K, PIECES,
                GATE_KIND, GATE_ALPHA, GATE_LIMIT, GATE_SHIFT, GATE_LIMIT_AFTER,
            )  # fmt: skip
        else:  # the unwritten half does no harm: weight gradients read blocks of HALF rows, `grouped_gemm` makes padding of it
            _gate_backward_tile(
                grad_out, copied_half, weight, added_half, added_weight, kept, top_k_weights, grad_kept, weighted, partial,
                slot_of_half, num_padded, m * BLOCK_M, n, expert, first, end,
                H, INNER, WIDTH, TOP_K, IS_GATED, IS_TRANSPOSED, IS_INTERLEAVED, RANK, STEP, HALF, BLOCK_N, BLOCK_K, PIECES,
                GATE_KIND, GATE_ALPHA, GATE_LIMIT, GATE_SHIFT, GATE_LIMIT_AFTER,
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
    H: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    GATE_KIND: tl.constexpr,
    GATE_ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    GATE_SHIFT: tl.constexpr,
    GATE_LIMIT_AFTER: tl.constexpr,
):
    """One tile of `ROWS` rows; an expert's last one may have half as many."""
    row = first + tl.arange(0, ROWS)
    if copied is None:
        pointers = grad_out + (slot // TOP_K).to(tl.int64)[:, None] * H + tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for k in range(0, H, BLOCK_K):
        if copied is not None:
            rows = copied.load([first_padded, k])
        elif H % BLOCK_K == 0:
            rows = tl.load(pointers + k)
        else:
            rows = tl.load(pointers + k, mask=(k + tl.arange(0, BLOCK_K) < H)[None, :], other=0.0)
        if IS_TRANSPOSED:
            acc = multiply(rows, weight.load([expert, n * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T, acc)
        else:
            acc = multiply(rows, weight.load([expert, k, n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N), acc)
    for r in tl.static_range(0, RANK, STEP):
        thin = added_weight.load([expert, r, n * BLOCK_N]).reshape(STEP, BLOCK_N)
        acc = multiply(added_rows.load([first_padded, r]), thin, acc)

    valid = row < end
    # A weight of zero makes the padding rows zero in what is stored; in the sums, that they are loaded as 0 and act(0) = 0.
    routing = tl.where(valid, tl.load(top_k_weights + slot).to(tl.float32), 0.0)[:, None]
    padded_row = first_padded + tl.arange(0, ROWS)
    target_row = padded_row.to(tl.int64)[:, None]
    source = kept + row.to(tl.int64)[:, None] * WIDTH
    sums = tl.zeros([ROWS], dtype=tl.float32)
    # The epilogue holds four values per column: in pieces they stay in registers. The next piece is read before
    # the last one is stored, because loads do not pass stores.
    SPAN: tl.constexpr = BLOCK_N // PIECES
    pieces = _halves(acc.to(kept.dtype.element_ty), ROWS, BLOCK_N)
    if PIECES >= 4:
        pieces = _halves(pieces[0], ROWS, BLOCK_N // 2) + _halves(pieces[1], ROWS, BLOCK_N // 2)
    if PIECES == 8:
        left = _halves(pieces[0], ROWS, BLOCK_N // 4) + _halves(pieces[1], ROWS, BLOCK_N // 4)
        right = _halves(pieces[2], ROWS, BLOCK_N // 4) + _halves(pieces[3], ROWS, BLOCK_N // 4)
        pieces = left + right
    projected = _read_kept(source, valid, n * BLOCK_N, INNER, WIDTH, IS_GATED, IS_INTERLEAVED, SPAN)
    for piece in tl.static_range(PIECES):
        first_column = n * BLOCK_N + piece * SPAN
        gate, up = projected
        if piece + 1 < PIECES:
            projected = _read_kept(source, valid, first_column + SPAN, INNER, WIDTH, IS_GATED, IS_INTERLEAVED, SPAN)
        grad = pieces[piece].to(tl.float32)
        if IS_GATED:
            value, by_gate, by_up = gate_backward(
                gate.to(tl.float32),
                up.to(tl.float32),
                GATE_KIND,
                GATE_ALPHA,
                GATE_LIMIT,
                GATE_SHIFT,
                GATE_LIMIT_AFTER,
            )
        else:
            value, by_gate = activate_with_derivative(gate.to(tl.float32), GATE_KIND, GATE_ALPHA)
            by_up = value
        # Columns past the end have a gradient of zero: their weights were read as zeros.
        sums += tl.sum(grad * value, 1)
        grad *= routing
        column = first_column + tl.arange(0, SPAN)
        _store_gradient(
            grad_kept + target_row * WIDTH,
            grad * by_gate,
            grad * by_up,
            first_column,
            INNER,
            WIDTH,
            IS_GATED,
            IS_INTERLEAVED,
            ROWS,
            SPAN,
        )
        tl.store(
            weighted + target_row * INNER + column[None, :],
            (routing * value).to(kept.dtype.element_ty),
            mask=(column < INNER)[None, :],
        )
    tl.store(partial + n * num_padded + padded_row, sums)


@triton.jit
def _halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right columns of a tile; both stay in the registers they are in."""
    return acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


@triton.jit
def _read_kept(
    source,
    valid,
    first_column,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Gate and up of `SPAN` columns; twice the projection itself where there is no gate.

    What is read here and written by `_store_gradient` is larger than the cache and not wanted again in this kernel: evicted
    first (but not if interleaved), it leaves the cache to the operands (0.973 to 0.948 ms at Qwen3's shape).
    """
    column = first_column + tl.arange(0, SPAN)
    mask = valid[:, None] & (column < INNER)[None, :]
    if IS_GATED and IS_INTERLEAVED:
        both = 2 * first_column + tl.arange(0, 2 * SPAN)
        pairs = tl.load(source + both[None, :], mask=valid[:, None] & (both < WIDTH)[None, :], other=0.0)
        gate, up = pairs.reshape(source.shape[0], SPAN, 2).split()
    else:
        gate = tl.load(source + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        up = gate
        if IS_GATED:
            up = tl.load(source + INNER + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    return gate, up


@triton.jit
def _store_gradient(
    target,
    grad_gate,
    grad_up,
    first_column,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Writes the gradient of `SPAN` columns in the layout of the projection."""
    column = first_column + tl.arange(0, SPAN)
    mask = (column < INNER)[None, :]
    dtype: tl.constexpr = target.dtype.element_ty
    if IS_GATED and IS_INTERLEAVED:
        both = 2 * first_column + tl.arange(0, 2 * SPAN)
        grads = tl.join(grad_gate.to(dtype), grad_up.to(dtype)).reshape(BLOCK_M, 2 * SPAN)
        tl.store(target + both[None, :], grads, mask=(both < WIDTH)[None, :])
    else:
        tl.store(target + column[None, :], grad_gate.to(dtype), mask=mask, eviction_policy="evict_first")
        if IS_GATED:
            tl.store(target + INNER + column[None, :], grad_up.to(dtype), mask=mask, eviction_policy="evict_first")
