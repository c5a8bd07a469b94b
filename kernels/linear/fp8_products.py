"""What a linear layer in FP8 computes on a GPU; `fp8_reference` has the same functions in torch.

    rows               x [T, K] with a scale for each token; a weight [N, K] with one for each output
    other_side         the weight as [K, N], which the input gradient sums over, with one scale
    product            values [T, K] times a weight [N, K], and the scales of both
    weight_gradient    the sum over tokens of dy[t] x[t]^T, the scales of both folded into dy

Values and scales are those of `moe/fp8_values.py`, in as few launches as possible: without a CUDA graph the host has no time for
more. Products are torch's, whose sums are promoted to fp32 on the way. Those of the tensor cores, in some 14 bits, come out too
small where factors have one sign: by 3.4 % over a depth of 2,048, 7 % over 4,096, 24 % over 16,384 (H200). They are the faster
ones, 1,380 TFLOP/s in place of 1,160 at the first depth, 1,490 in place of 1,370 at the last.

    T tokens   K inputs   N outputs   P tokens, rounded up to a multiple of 16
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchgen.kernels.moe.fp8_values import DTYPE, inverse_of, quantise_weight
from patchgen.kernels.moe.plan import VARYING

_PIECE = 16
"""torch's products take depths that are multiples of this."""


def rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """`([T, K], [T])` of `[T, K]`."""
    quantised = quantise_weight(values)
    return quantised.values, quantised.scales


def other_side(weight: Tensor, row_scales: Tensor) -> tuple[Tensor, Tensor]:
    """`([K, N], [K])` of a weight `[N, K]` and the scales of its rows; all scales are the largest of these."""
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    out = torch.empty(inputs, outputs, dtype=DTYPE, device=weight.device)
    scales = torch.empty(inputs, dtype=torch.float32, device=weight.device)
    _transpose_linear[(triton.cdiv(inputs, 128), triton.cdiv(outputs, 128))](
        weight, row_scales, out, scales,
        N=outputs, K=inputs, BLOCK=128, WIDTH=triton.next_power_of_2(outputs), num_warps=4,
    )  # fmt: skip
    return out, scales


@triton.jit
def _transpose_linear(
    weight, row_scales, out, scales, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    every = tl.arange(0, WIDTH)
    largest = tl.max(tl.load(row_scales + every, mask=every < N, other=0.0), 0)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < N)[:, None] & (column < K)[None, :]
    of_row = tl.load(row_scales + row, mask=row < N, other=1.0)
    value = tl.load(weight + row.to(tl.int64)[:, None] * K + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value = (value * inverse_of(of_row)[:, None]).to(out.dtype.element_ty).to(tl.float32)
    value = (value * (of_row * inverse_of(largest))[:, None]).to(out.dtype.element_ty)
    tl.store(out + column.to(tl.int64)[:, None] * N + row[None, :], value.T, mask=mask.T)
    tl.store(scales + column, tl.zeros([BLOCK], tl.float32) + largest, mask=(column < K) & (tl.program_id(1) == 0))


def product(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`[T, N]`."""
    return torch._scaled_mm(
        values, weight.t(), scale_a=scales[:, None], scale_b=weight_scales[None], bias=bias, out_dtype=dtype
    )


def weight_gradient(grads: Tensor, grad_scales: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`[N, K]` of dy `[T, N]` and x `[T, K]` in FP8."""
    folded = grad_scales * scales
    largest = folded.amax()
    left, right = transposed(grads, folded, largest), transposed(values, None, None)
    return torch._scaled_mm(left, right.t(), scale_a=largest, scale_b=torch.ones_like(largest), out_dtype=dtype)


def transposed(values: Tensor, factors: Tensor | None, largest: Tensor | None) -> Tensor:
    """`[N, P]` in FP8 of `values [T, N]` in FP8, each row times its factor over the largest, powers of two; zeros from T on."""
    num_rows, columns = values.shape
    padded = triton.cdiv(num_rows, _PIECE) * _PIECE
    out = torch.empty(columns, padded, dtype=DTYPE, device=values.device)
    grid = (triton.cdiv(columns, 128), triton.cdiv(padded, 128))
    _transpose_factor[grid](values, factors, largest, out, num_rows, padded, N=columns, BLOCK=128, num_warps=4)
    return out


@triton.jit(do_not_specialize=VARYING)
def _transpose_factor(values, factors, largest, out, num_rows, padded, N: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    value = tl.load(values + row.to(tl.int64)[:, None] * N + column[None, :], mask=mask, other=0.0)
    if factors is not None:
        factor = tl.load(factors + row, mask=row < num_rows, other=0.0) * inverse_of(tl.load(largest))
        value = (value.to(tl.float32) * factor[:, None]).to(out.dtype.element_ty)
    target = out + column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(target, value.T, mask=(column < N)[:, None] & (row < padded)[None, :])
