"""The experts of one MoE layer with every product in FP8, in torch: rounded where the `fp8` backend rounds, summed in fp32.

What the kernels are compared with: the same numbers up to the order of sums.

    y[r]      = Q(gate(Q(x[r]) @ Q(gate_up)^T)) @ Q(down)^T           Q: a scale per row of the depth
    g[r]      = Q(dout[r]) @ E(down)                                  E: one scale per expert
    dx[r]     = Q(dh[r]) @ E(gate_up)           with dh = w g gate'(h)
    d_down    = sum_r Q(dout[r]) F(w a)[r]^T                          F: both factors' scales folded into one, see `fold`
    d_gate_up = sum_r F(dh)[r] Q(x[r])^T

    R rows of one expert   H hidden size   I expert intermediate size
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Gate = Callable[[Tensor], Tensor]

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
_LEAST_EXPONENT = -60


def scale_of(largest: Tensor) -> Tensor:
    """The least power of two, 2^-60 at least, by which `largest` is at most 448."""
    fraction, exponent = torch.frexp(largest.float() * (1 / LARGEST))
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    exponent = torch.where(fraction == 0, _LEAST_EXPONENT, exponent.clamp(min=_LEAST_EXPONENT))
    return torch.ldexp(torch.ones_like(fraction), exponent)


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`(values, scales)`: the last dimension is what a product sums over. Values are e4m3 numbers in fp32."""
    scales = scale_of(rows.abs().amax(-1))
    return rounded(rows.float() / scales[..., None]), scales


def rounded(values: Tensor) -> Tensor:
    return values.to(DTYPE).float()


def fold(values: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """`(values, scale)` of rows times the scales of both factors of a product over rows, `factors [R]`."""
    scale = factors.amax()
    return rounded(values * (factors / scale)[:, None]), scale


def dequantised(rows: Tensor) -> Tensor:
    values, scales = quantise(rows)
    return values * scales[..., None]


def _of_expert(weight: Tensor) -> Tensor:
    """Its rows with one scale for all of them: values far below the largest are rounded twice."""
    values, scales = quantise(weight)
    largest = scales.amax()
    return rounded(values * (scales / largest)[:, None]) * largest


class _Expert(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RH: Tensor, routing_R: Tensor, gate_up: Tensor, down: Tensor, gate: Gate, wide: bool) -> Tensor:
        h_R2I = (dequantised(x_RH) @ dequantised(gate_up).T).to(x_RH.dtype)
        y_RH = (dequantised(gate(h_R2I.float())) @ dequantised(down).T).to(x_RH.dtype)
        ctx.save_for_backward(x_RH, routing_R, gate_up, down, h_R2I)
        ctx.gate, ctx.wide = gate, wide
        return y_RH * routing_R[:, None]

    @staticmethod
    def backward(ctx, grad_RH: Tensor):
        x_RH, routing_R, gate_up, down, h_R2I = ctx.saved_tensors
        dtype = x_RH.dtype
        grads, grad_scales = quantise(grad_RH)
        g_RI = ((grads * grad_scales[:, None]) @ _of_expert(down)).to(dtype).float()
        with torch.enable_grad():
            h = h_R2I.detach().float().requires_grad_()
            a = ctx.gate(h)
        (dh,) = torch.autograd.grad(a, h, g_RI * routing_R[:, None].float())
        dh_values, dh_scales = quantise(dh)
        weighted_values, weighted_scales = quantise(a.detach() * routing_R[:, None].float())
        dx_RH = ((dh_values * dh_scales[:, None]) @ _of_expert(gate_up)).to(dtype)
        router = (g_RI * a.detach()).sum(1).to(routing_R.dtype)
        if ctx.wide:
            weighted = (a.detach() * routing_R[:, None].float()).to(dtype).float()
            d_down, d_gate_up = grad_RH.float().T @ weighted, dh.to(dtype).float().T @ x_RH.float()
            return dx_RH, router, d_gate_up.to(dtype), d_down.to(dtype), None, None
        right, scale = fold(weighted_values, weighted_scales * grad_scales)
        d_down = grads.T @ right * scale
        x_values, x_scales = quantise(x_RH)
        left, scale = fold(dh_values, dh_scales * x_scales)
        d_gate_up = left.T @ x_values * scale
        return dx_RH, router, d_gate_up.to(dtype), d_down.to(dtype), None, None


def fp8_reference(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate: Gate,
    wide_gradients: bool = False,
) -> Tensor:
    """`[T, H]`; shapes as in `runtime.ops.fused_moe`, with `gate` from `[R, 2I]` to `[R, I]`. With `wide_gradients` those
    of weights are not rounded to FP8.

    Differentiable in every floating-point argument. Waits for the device once per expert.
    """
    out_TH = hidden_states * 0  # in the graph, also without rows
    for expert in range(gate_up_proj.shape[0]):
        token_R, slot_R = torch.where(top_k_index == expert)
        if not token_R.numel():
            continue
        rows_RH = _Expert.apply(
            hidden_states[token_R],
            top_k_weights[token_R, slot_R],
            gate_up_proj[expert],
            down_proj[expert],
            gate,
            wide_gradients,
        )
        out_TH = out_TH.index_add(0, token_R, rows_RH)
    return out_TH
