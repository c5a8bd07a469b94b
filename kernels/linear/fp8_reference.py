"""The functions of `fp8_products` in torch: rounded where the kernels round, summed in fp32. What runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from patchgen.kernels.moe.fp8_reference import DTYPE, fold, quantise, rounded


def rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp8_products.rows`."""
    quantised, scales = quantise(values)
    return quantised.to(DTYPE), scales


def other_side(weight: Tensor, row_scales: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp8_products.other_side`: values far below the largest are rounded twice."""
    values, largest = rounded(weight.float() / row_scales[:, None]), row_scales.amax()
    values = rounded(values * (row_scales / largest)[:, None])
    return values.T.contiguous().to(DTYPE), largest.repeat(weight.shape[1])


def product(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """As `fp8_products.product`."""
    out = (values.float() * scales[:, None]) @ (weight.float() * weight_scales[:, None]).T
    return (out if bias is None else out + bias.float()).to(dtype)


def weight_gradient(grads: Tensor, grad_scales: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As `fp8_products.weight_gradient`."""
    left, largest = fold(grads.float(), grad_scales * scales)
    return (left.T @ values.float() * largest).to(dtype)
