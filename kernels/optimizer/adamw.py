"""An AdamW step in one pass over memory: it reads the gradient in its own dtype, applies the clipping factor, and also writes
the parameter's copy that layers compute with.

torch's fused AdamW takes gradients in the dtype of the parameter, already clipped; the copy needs another pass after it.
For an fp32 parameter with a bf16 gradient that is, in bytes per parameter:

    gradient to fp32 6, clipped 8, AdamW 28, copy cast 6     48
    here                                                     28: p, m, v read and written 24, gradient read 2, copy written 2
    the copy in FP8, too                                     29: instead of the 3 of `quantise_weight` after it

Formula and order are torch's, in fp32 (aten/src/ATen/native/cuda/fused_adam_utils.cuh).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchgen.kernels.moe.fp8_values import Quantised, scale_of

_BLOCK, _WARPS = 1024, 4
_VALUES_PER_WARP = 256
"""Of a long row, which one program holds whole."""


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    taken: Tensor | None = None,
    copy: Tensor | None = None,
    rows: Quantised | None = None,
) -> None:
    """Updates `parameter`, `exp_avg` and `exp_avg_sq` in place.

    Args:
        parameter, gradient, exp_avg, exp_avg_sq: of one shape, contiguous, each fp32 or narrower; computed with in fp32.
        step: of this update; the first is 1.
        factor: a tensor of one element on the same device; the gradient is multiplied by it. None: 1.
        taken: a bool tensor of one element on the same device; where it is False the three keep their values, whatever the
            gradient. None: True.
        copy: receives the new values; contiguous, of any dtype, with as many elements.
        rows: receives what `quantise_weight` would make of the copy, which it needs; in rows of its last dimension.

    Raises:
        ValueError: tensors that are not contiguous or not of one size.
    """
    if rows is not None and copy is None:
        raise ValueError("adamw_ quantises the copy; found rows to write, and no copy.")
    tensors = [parameter, gradient, exp_avg, exp_avg_sq]
    tensors += [tensor for tensor in (copy, rows and rows.values) if tensor is not None]
    if any(tensor.numel() != parameter.numel() or not tensor.is_contiguous() for tensor in tensors):
        raise ValueError(
            "adamw_ takes contiguous tensors of one size, found "
            f"{', '.join(f'{tuple(tensor.shape)} with strides {tensor.stride()}' for tensor in tensors)}."
        )
    if parameter.numel() == 0:
        return
    values, scales = (None, None) if rows is None else rows
    width = _BLOCK if values is None else values.shape[-1]
    block = triton.next_power_of_2(width)
    _adamw[(triton.cdiv(parameter.numel(), width),)](
        parameter,
        gradient,
        exp_avg,
        exp_avg_sq,
        copy,
        values,
        scales,
        factor,
        taken,
        parameter.numel(),
        1 - lr * weight_decay,
        betas[0],
        1 - betas[0],
        betas[1],
        1 - betas[1],
        eps,
        lr / (1 - betas[0] ** step),
        math.sqrt(1 - betas[1] ** step),
        WIDTH=width,
        BLOCK=block,
        num_warps=max(_WARPS, min(block // _VALUES_PER_WARP, 16)),
    )
    torch.autograd.graph.increment_version([parameter, exp_avg, exp_avg_sq])


@triton.jit
def _adamw(
    parameter,
    gradient,
    exp_avg,
    exp_avg_sq,
    copy,
    values,
    scales,
    factor,
    taken,
    numel,
    decay_factor,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    step_size,
    sqrt_bias_correction2,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offset = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, BLOCK)
    in_bounds = (offset < numel) & (tl.arange(0, BLOCK) < WIDTH)
    p = tl.load(parameter + offset, mask=in_bounds, other=0.0).to(tl.float32)
    g = tl.load(gradient + offset, mask=in_bounds, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + offset, mask=in_bounds, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + offset, mask=in_bounds, other=0.0).to(tl.float32)
    if factor is not None:
        g = g * tl.load(factor).to(tl.float32)
    old_p, old_m, old_v = p, m, v
    # Written as fused sums, which the compiler would else choose in one way with rows and in another without.
    m = tl.fma(g, one_minus_beta1, m * beta1)
    v = tl.fma(one_minus_beta2 * g, g, v * beta2)
    p = tl.fma(p, decay_factor, -(step_size * m / (tl.sqrt_rn(v) / sqrt_bias_correction2 + eps)))
    if taken is not None:
        is_taken = tl.load(taken) != 0
        p, m, v = tl.where(is_taken, p, old_p), tl.where(is_taken, m, old_m), tl.where(is_taken, v, old_v)
    tl.store(parameter + offset, p.to(parameter.dtype.element_ty), mask=in_bounds)
    tl.store(exp_avg + offset, m.to(exp_avg.dtype.element_ty), mask=in_bounds)
    tl.store(exp_avg_sq + offset, v.to(exp_avg_sq.dtype.element_ty), mask=in_bounds)
    if copy is not None:
        tl.store(copy + offset, p.to(copy.dtype.element_ty), mask=in_bounds)
        if values is not None:
            rounded = tl.where(in_bounds, p.to(copy.dtype.element_ty).to(tl.float32), 0.0)
            scale, inverse = scale_of(tl.max(tl.abs(rounded), 0))
            tl.store(values + offset, (rounded * inverse).to(values.dtype.element_ty), mask=in_bounds)
            tl.store(scales + tl.program_id(0), scale)
