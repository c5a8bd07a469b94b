"""What a linear layer in FP8 computes on a GPU; `fp8_reference` has the same functions in torch.

    rows               x [T, K] with a scale for each token; a weight [N, K] with one for each output
    other_side         the weight as [K, N], which the input gradient sums over, with one scale
    product            values [T, K] times a weight [N, K], and the scales of both
    weight_gradient    the sum over tokens of dy[t] x[t]^T, the scales of both folded into dy

Values and scales are those of `moe/fp8_values.py`. Products are torch's: 1,300 TFLOP/s at 16,384 x 2,048 x 4,096 on an H200,
where the grouped product of the experts reaches 1,140.

    T tokens   K inputs   N outputs   P tokens, rounded up to a multiple of 16
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchgen.kernels.moe.fp8_values import DTYPE, quantise_transposed, quantise_weight
from patchgen.kernels.moe.plan import VARYING

_PIECE = 16
"""torch's products take depths that are multiples of this."""


def rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """`([T, K], [T])` of `[T, K]`."""
    found = quantise_weight(values[None])
    return found.values[0], found.scales[0]


def other_side(weight: Tensor, row_scales: Tensor) -> tuple[Tensor, Tensor]:
    """`([K, N], [K])` of a weight `[N, K]` and the scales of its rows; all scales are the largest of these."""
    found = quantise_transposed(weight[None], row_scales[None])
    return found.values[0], found.scales[0]


def product(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`[T, N]`. Sums are not promoted on the way, see `moe/fp8_product.py`."""
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=scales[:, None],
        scale_b=weight_scales[None],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def weight_gradient(grads: Tensor, grad_scales: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`[N, K]` of dy `[T, N]` and x `[T, K]` in FP8."""
    folded = grad_scales * scales
    largest = folded.amax()
    left, right = transposed(grads, folded / largest), transposed(values, None)
    return torch._scaled_mm(
        left, right.t(), scale_a=largest, scale_b=torch.ones_like(largest), out_dtype=dtype, use_fast_accum=True
    )


def transposed(values: Tensor, factors: Tensor | None) -> Tensor:
    """`[N, P]` in FP8 of `values [T, N]` in FP8, each row times its factor, a power of two; zeros from T on."""
    num_rows, columns = values.shape
    padded = triton.cdiv(num_rows, _PIECE) * _PIECE
    out = torch.empty(columns, padded, dtype=DTYPE, device=values.device)
    grid = (triton.cdiv(columns, 128), triton.cdiv(padded, 128))
    _transpose_rows[grid](values, factors, out, num_rows, padded, N=columns, BLOCK=128, num_warps=4)
    return out


@triton.jit(do_not_specialize=VARYING)
def _transpose_rows(values, factors, out, num_tokens, padded, N: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_tokens)[:, None] & (column < N)[None, :]
    value = tl.load(values + row.to(tl.int64)[:, None] * N + column[None, :], mask=mask, other=0.0)
    if factors is not None:
        factor = tl.load(factors + row, mask=row < num_tokens, other=0.0)
        value = (value.to(tl.float32) * factor[:, None]).to(out.dtype.element_ty)
    target = out + column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(target, value.T, mask=(column < N)[:, None] & (row < padded)[None, :])
