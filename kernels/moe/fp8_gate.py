"""The gate between the two products in FP8, and its gradient, row by row: a row is quantised over all of its columns.

forward     a[p] = gate(h[p])                                            in FP8
backward    dh[p] = w[p] * g[p] * gate'(h[p]),  s[p] = w[p] * a[p]       in FP8, zero in padding rows
            dw[p] = <g[p], a[p]>                                         the routing weight's gradient, fp32
            dh, s                                                        for wide weight gradients in their dtype, too

P padded rows   I expert intermediate size
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchgen.kernels.elementwise.activations import Activation
from patchgen.kernels.moe.fp8_values import Quantised, new_rows, scale_of
from patchgen.kernels.moe.plan import BLOCK_M, VARYING, Plan
from patchgen.kernels.moe.triton_gate import gate_backward, gate_constants, gate_forward

_VALUES = 2048
"""Of a block of rows."""


def fp8_gate(projected: Tensor, plan: Plan, activation: Activation) -> Quantised:
    """`a [P, I]` from `projected [P, 2I]`, gate first; padding rows are undefined."""
    inner = projected.shape[1] // 2
    out = new_rows(plan.num_padded, inner, projected.device)
    rows, width = _block(inner)
    _fp8_gate[(plan.num_padded // rows,)](
        projected, *out, plan.tile_start, plan.num_experts,
        INNER=inner, ROWS=rows, WIDTH=width, BLOCK_M=BLOCK_M, num_warps=4, **gate_constants(activation),
    )  # fmt: skip
    return out


def _block(inner: int) -> tuple[int, int]:
    """Rows and columns of a block."""
    width = triton.next_power_of_2(inner)
    return min(max(_VALUES // width, 1), BLOCK_M), width


@triton.jit
def _fp8_gate(
    projected,
    values,
    scales,
    tile_start,
    num_experts,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GATE_KIND: tl.constexpr,
    GATE_ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    GATE_SHIFT: tl.constexpr,
    GATE_LIMIT_AFTER: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    if first < tl.load(tile_start + num_experts) * BLOCK_M:
        row = first + tl.arange(0, ROWS)
        wide_row = row.to(tl.int64)[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        source = projected + wide_row * (2 * INNER) + column
        gate = tl.load(source, mask=column < INNER, other=0.0).to(tl.float32)
        up = tl.load(source + INNER, mask=column < INNER, other=0.0).to(tl.float32)
        out = gate_forward(gate, up, GATE_KIND, GATE_ALPHA, GATE_LIMIT, GATE_SHIFT, GATE_LIMIT_AFTER)
        out = tl.where(column < INNER, out, 0.0)
        scale, inverse = scale_of(tl.max(tl.abs(out), 1))
        tl.store(
            values + wide_row * INNER + column,
            (out * inverse[:, None]).to(values.dtype.element_ty),
            mask=column < INNER,
        )
        tl.store(scales + row, scale)


def fp8_gate_backward(
    grad: Tensor, projected: Tensor, top_k_weights: Tensor, plan: Plan, activation: Activation, wide: bool = False
) -> tuple[Quantised, Quantised | None, tuple[Tensor, Tensor] | None, Tensor]:
    """`(dh [P, 2I], s [P, I], None, dw [1, P])`; if `wide`, `(dh, None, (dh, s), dw)`, the pair in the dtype of `grad`.

    Args:
        grad: `[P, I]`, the gradient of `a` without the routing weight.
        projected: `[P, 2I]`, of the forward.
        top_k_weights: `[T, K]`.
        wide: for weight gradients that are not computed in FP8.
    """
    inner = grad.shape[1]
    grad_projected = new_rows(plan.num_padded, 2 * inner, grad.device)
    narrow, pair = None, None
    if wide:
        pair = grad.new_empty(plan.num_padded, 2 * inner), torch.empty_like(grad)
        weighted = (pair[1], None)
    else:
        weighted = narrow = new_rows(plan.num_padded, inner, grad.device)
    partial = torch.empty(1, plan.num_padded, dtype=torch.float32, device=grad.device)
    rows, width = _block(inner)
    _fp8_gate_backward[(plan.num_padded // rows,)](
        grad, projected, top_k_weights, *grad_projected, *weighted, pair and pair[0], partial,
        plan.slot_of_padded, plan.tile_start, plan.tiles, plan.num_experts, plan.tiles.shape[1],
        INNER=inner, ROWS=rows, WIDTH=width, BLOCK_M=BLOCK_M, num_warps=4, **gate_constants(activation),
    )  # fmt: skip
    return grad_projected, narrow, pair, partial


@triton.jit(do_not_specialize=VARYING)
def _fp8_gate_backward(
    grad,
    projected,
    top_k_weights,
    grad_values,
    grad_scales,
    weighted_values,
    weighted_scales,
    wide_grad,
    partial,
    slot_of_padded,
    tile_start,
    tiles,
    num_experts,
    num_tiles,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GATE_KIND: tl.constexpr,
    GATE_ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    GATE_SHIFT: tl.constexpr,
    GATE_LIMIT_AFTER: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    tile = first // BLOCK_M
    if tile < tl.load(tile_start + num_experts):
        row = first + tl.arange(0, ROWS)
        compact = tl.load(tiles + num_tiles + tile) + row - tile * BLOCK_M
        valid = compact < tl.load(tiles + 2 * num_tiles + tile)
        routing = tl.load(top_k_weights + tl.load(slot_of_padded + row)).to(tl.float32)
        wide_row = row.to(tl.int64)[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        mask = valid[:, None] & (column < INNER)
        source = projected + wide_row * (2 * INNER) + column
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + INNER, mask=mask, other=0.0).to(tl.float32)
        value, by_gate, by_up = gate_backward(
            gate, up, GATE_KIND, GATE_ALPHA, GATE_LIMIT, GATE_SHIFT, GATE_LIMIT_AFTER
        )
        gradient = tl.load(grad + wide_row * INNER + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(partial + row, tl.sum(gradient * value, 1))
        gradient *= routing[:, None]
        by_gate, by_up = gradient * by_gate, gradient * by_up
        value = tl.where(mask, value * routing[:, None], 0.0)

        scale, inverse = scale_of(tl.maximum(tl.max(tl.abs(by_gate), 1), tl.max(tl.abs(by_up), 1)))
        target = grad_values + wide_row * (2 * INNER) + column
        dtype: tl.constexpr = grad_values.dtype.element_ty
        tl.store(target, (by_gate * inverse[:, None]).to(dtype), mask=column < INNER)
        tl.store(target + INNER, (by_up * inverse[:, None]).to(dtype), mask=column < INNER)
        tl.store(grad_scales + row, scale)

        target = weighted_values + wide_row * INNER + column
        if weighted_scales is None:
            tl.store(target, value.to(weighted_values.dtype.element_ty), mask=column < INNER)
            target = wide_grad + wide_row * (2 * INNER) + column
            tl.store(target, by_gate.to(wide_grad.dtype.element_ty), mask=column < INNER)
            tl.store(target + INNER, by_up.to(wide_grad.dtype.element_ty), mask=column < INNER)
        else:
            scale, inverse = scale_of(tl.max(tl.abs(value), 1))
            tl.store(target, (value * inverse[:, None]).to(dtype), mask=column < INNER)
            tl.store(weighted_scales + row, scale)
