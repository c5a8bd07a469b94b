"""Tensors in FP8 (e4m3) with one scale per row of the depth that a product sums over.

    value = scale * q        scale = the least power of two for which |q| <= 448, the largest number of e4m3

A scale depends on its row alone, so on no layout of ranks. It is a power of two, so that a row times another such scale has
the same digits: the gradients of weights, whose sums run over rows, fold the scales of both factors into one of them exactly,
but for what falls below the smallest number of e4m3, 2^-9.

    T tokens   K slots per token   P padded rows   D depth   E experts   N columns
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchgen.kernels.moe.plan import BLOCK_M, VARYING, Plan

DTYPE = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
_LEAST_EXPONENT = tl.constexpr(67)
"""As in the bits of an fp32 number: scales are 2^-60 at least, of rows of zeros too."""
_VALUES = 4096
"""Of a block of rows of a weight, if that many fit."""


class Quantised(NamedTuple):
    """A tensor in FP8.

    Attributes:
        values: rows `[P, D]`, or a weight `[E, N, D]`: the depth is last, as the tensor cores need it.
        scales: fp32, `[P]` or `[E, N]`.
    """

    values: Tensor
    scales: Tensor


def new_rows(num_rows: int, depth: int, device: torch.device) -> Quantised:
    """Rows that nothing has written."""
    return Quantised(
        torch.empty(num_rows, depth, dtype=DTYPE, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
    )


@triton.jit
def scale_of(largest):
    """The scale of rows with these largest magnitudes, and its inverse."""
    exponent = (
        (largest * (1.0 / LARGEST)).to(tl.int32, bitcast=True) + 0x7FFFFF
    ) >> 23  # rounded up to a power of two
    exponent = tl.maximum(exponent, _LEAST_EXPONENT)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


def quantise_tokens(tokens: Tensor, plan: Plan, top_k: int) -> tuple[Quantised, Tensor]:
    """Rows `[P, D]` from `tokens [T, D]`, each quantised once and written to its K rows, and the scales `[T]`.

    Padding rows are not written.
    """
    num_tokens, depth = tokens.shape
    out = new_rows(plan.num_padded, depth, tokens.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=tokens.device)
    width = triton.next_power_of_2(depth)
    _quantise_tokens[(num_tokens,)](
        tokens, plan.padded_of_slot, *out, scales, D=depth, TOP_K=top_k, WIDTH=width, num_warps=_warps(width)
    )
    return out, scales


def _warps(width: int) -> int:
    return min(max(width // 1024, 1), 8)


@triton.jit
def _quantise_tokens(
    tokens, padded_of_slot, values, scales, token_scales, D: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    value = tl.load(tokens + token * D + column, mask=column < D, other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.abs(value), 0))
    quantised = (value * inverse).to(values.dtype.element_ty)
    tl.store(token_scales + token, scale)
    for k in tl.static_range(TOP_K):
        row = tl.load(padded_of_slot + token * TOP_K + k)
        if row >= 0:
            tl.store(values + row.to(tl.int64) * D + column, quantised, mask=column < D)
            tl.store(scales + row, scale)


def quantise_weight(weight: Tensor) -> Quantised:
    """`weight [..., N, D]`, of experts or of a linear layer, with a scale for each row `[..., N]`; of tokens `[T, D]` likewise."""
    weight = weight.contiguous()
    depth = weight.shape[-1]
    values = torch.empty(weight.shape, dtype=DTYPE, device=weight.device)
    scales = torch.empty(weight.shape[:-1], dtype=torch.float32, device=weight.device)
    width = triton.next_power_of_2(depth)
    per_program = max(_VALUES // width, 1)
    _quantise_rows[(triton.cdiv(scales.numel(), per_program),)](
        weight, values, scales, scales.numel(), D=depth, ROWS=per_program, WIDTH=width, num_warps=4
    )
    return Quantised(values, scales)


@triton.jit(do_not_specialize=VARYING)
def _quantise_rows(weight, values, scales, num_rows, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    mask = (row < num_rows)[:, None] & (column < D)
    value = tl.load(weight + row[:, None] * D + column, mask=mask, other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.abs(value), 1))
    tl.store(values + row[:, None] * D + column, (value * inverse[:, None]).to(values.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < num_rows)


def quantise_transposed(weight: Tensor, row_scales: Tensor) -> Quantised:
    """`[E, D, N]` from `weight [E, N, D]`, for the product over its other side.

    The largest of an expert's `row_scales [E, N]`, which `quantise_weight` found, is the scale of all of its columns: one
    reading of the weight, where scales by column would take two. Values are those of `quantise_weight`, rounded again only
    where they fall below 2^-6 over the larger scale; so the bits are the same as from kept rows.
    """
    return _transposed_weight(weight.contiguous(), row_scales)


def transpose_quantised(rows: Quantised) -> Quantised:
    """What `quantise_transposed` returns for the weight that `quantise_weight` made `rows` of: half the bytes to read."""
    return _transposed_weight(rows.values, rows.scales)


def _transposed_weight(weight: Tensor, row_scales: Tensor) -> Quantised:
    num_experts, rows, columns = weight.shape
    values = torch.empty(num_experts, columns, rows, dtype=DTYPE, device=weight.device)
    scales = row_scales.amax(1, keepdim=True).expand(num_experts, columns).contiguous()
    grid = (triton.cdiv(columns, 128), triton.cdiv(rows, 128), num_experts)
    _transpose_weight[grid](
        weight, row_scales, values, scales,
        N=rows, D=columns, BLOCK=128, IS_QUANTISED=weight.dtype == DTYPE, num_warps=4,
    )  # fmt: skip
    return Quantised(values, scales)


@triton.jit
def inverse_of(scale):
    """Of a power of two, by its exponent."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _transpose_weight(
    weight,
    row_scales,
    values,
    scales,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
):
    expert = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < N)[:, None] & (column < D)[None, :]
    first = expert * N * D
    of_row = tl.load(row_scales + expert * N + row, mask=row < N, other=1.0)
    value = tl.load(weight + first + row[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if not IS_QUANTISED:
        value = (value * inverse_of(of_row)[:, None]).to(values.dtype.element_ty).to(tl.float32)
    factor = of_row * inverse_of(tl.load(scales + expert * D))
    quantised = (value * factor[:, None]).to(values.dtype.element_ty)
    tl.store(values + first + column[:, None] * N + row[None, :], quantised.T, mask=mask.T)


def transpose_tokens(tokens: Tensor, scales: Tensor, plan: Plan, top_k: int) -> Tensor:
    """`[D, P]` in FP8: `tokens [T, D]` over their `scales [T]`, by padded row; padding rows repeat one of their expert's.

    Columns of unused tiles are not written.
    """
    return _transpose(tokens, plan, tokens.shape[1], scales, None, None, top_k)


def transpose_rows(rows: Quantised, others: Tensor, plan: Plan, top_k: int) -> tuple[Tensor, Tensor]:
    """`([D, P], [E])`: rows times their own scales and those of the other factor, over one scale per expert.

    With `q_o` the other factor in FP8, by padded row too, the sum over an expert's rows of `row * other` is that of what is
    returned times `q_o`, times the expert's scale. Columns of unused tiles are not written.

    Args:
        others: `[T]`, the scales of the tokens that are the other factor.
    """
    of_expert = torch.empty(plan.num_experts, dtype=torch.float32, device=others.device)
    _largest_scales[(plan.num_experts,)](
        rows.scales,
        others,
        plan.slot_of_padded,
        plan.row_start,
        plan.tile_start,
        of_expert,
        TOP_K=top_k,
        TILE_ROWS=BLOCK_M,
        BLOCK=1024,
        num_warps=4,
    )
    return _transpose(rows.values, plan, rows.values.shape[1], rows.scales, others, of_expert, top_k), of_expert


@triton.jit
def _largest_scales(
    scales,
    others,
    slot_of_padded,
    row_start,
    tile_start,
    of_expert,
    TOP_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    num_rows = tl.load(row_start + expert + 1) - tl.load(row_start + expert)
    first = tl.load(tile_start + expert) * TILE_ROWS
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < num_rows
        token = tl.load(slot_of_padded + first + row, mask=mask, other=0) // TOP_K
        scale = tl.load(scales + first + row, mask=mask, other=0.0)
        largest = tl.maximum(largest, scale * tl.load(others + token, mask=mask, other=0.0))
    result = tl.max(largest, 0)
    tl.store(of_expert + expert, tl.where(result == 0.0, 1.0, result))


def _transpose(
    source: Tensor, plan: Plan, depth: int, scales: Tensor, others: Tensor | None, of_expert: Tensor | None, top_k: int
) -> Tensor:
    out = torch.empty(depth, plan.num_padded, dtype=DTYPE, device=source.device)
    num_tiles = plan.tiles.shape[1]
    _transpose_tile[(triton.cdiv(depth, 128), num_tiles)](
        source, scales, others, of_expert, plan.slot_of_padded, plan.tile_start, plan.tiles, out,
        plan.num_padded, plan.num_experts,
        D=depth, TOP_K=top_k, BLOCK=128, BLOCK_M=BLOCK_M, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=VARYING)
def _transpose_tile(
    source,
    scales,
    others,
    of_expert,
    slot_of_padded,
    tile_start,
    tiles,
    out,
    num_padded,
    num_experts,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    tile = tl.program_id(1)
    if tile < tl.load(tile_start + num_experts):
        padded = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(slot_of_padded + padded) // TOP_K
        if others is None:
            row = token
            factor = 1.0 / tl.load(scales + token)
        else:
            row = padded
            factor = tl.load(scales + row) / tl.load(of_expert + tl.load(tiles + tile)) * tl.load(others + token)
        in_bounds = (column < D)[None, :]
        value = tl.load(source + row.to(tl.int64)[:, None] * D + column[None, :], mask=in_bounds, other=0.0)
        value = (value.to(tl.float32) * factor[:, None]).to(out.dtype.element_ty)
        target = out + column.to(tl.int64)[:, None] * num_padded + padded[None, :]
        tl.store(target, value.T, mask=(column < D)[:, None])
