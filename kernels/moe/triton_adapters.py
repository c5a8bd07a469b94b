"""The experts of one MoE layer with low-rank adapters beside frozen weights, in Triton: two operators as in `triton_backend`.

    forward    plan -> u1 = x a1^T  -> gate_up (+ u1 b1^T)  -> u2 = a a2^T -> grouped_gemm (+ u2 b2^T) -> combine
    backward   v2 = grad b2 -> gate_backward_gemm (+ v2 a2) -> v1 = dh b1  -> grouped_gemm (+ v1 a1)   -> combine
               then the gradients of the four factors, and of the routing weights; none of the weights

The kernels of the weights add the terms in brackets as further depth steps of their tiles (`plan.LowRankTerm`), so low-rank
products as wide as the weight never exist in memory. Saved for the backward in addition to `triton_backend`: u1.

    P padded rows   r rank   a1 [E, r, H]   b1 [E, W, r]   a2 [E, r, I]   b2 [E, H, r]   other letters as in `triton_backend`
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchgen.kernels.elementwise.activations import Activation
from patchgen.kernels.moe import early_gradients
from patchgen.kernels.moe.adapters import ExpertAdapters, LowRank
from patchgen.kernels.moe.combine import combine, router_gradient
from patchgen.kernels.moe.gate_backward import gate_backward_gemm
from patchgen.kernels.moe.gate_up import gate_up
from patchgen.kernels.moe.grouped_gemm import grouped_gemm
from patchgen.kernels.moe.grouped_gemm_weights import grouped_gemm_weights
from patchgen.kernels.moe.pad_rows import pad_rows
from patchgen.kernels.moe.plan import LowRankTerm, Plan, empty_plan, make_plan

Factors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def factors_of(adapters: ExpertAdapters, is_transposed: bool) -> Factors:
    """`(a1, b1, a2, b2)`, contiguous, with the scale multiplied into b; None for a weight without an adapter."""

    def both(adapter: LowRank | None) -> tuple[Tensor | None, Tensor | None]:
        if adapter is None:
            return None, None
        a, b = adapter.padded().factors(is_transposed)
        return a.contiguous(), (b * adapter.scale).contiguous()

    return *both(adapters.gate_up), *both(adapters.down)


@torch.library.custom_op("patchgen::moe_adapted_forward", mutates_args=())
def moe_adapted_forward(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    a1: Tensor | None,
    b1: Tensor | None,
    a2: Tensor | None,
    b2: Tensor | None,
    is_transposed: bool,
    is_interleaved: bool,
    kind: str,
    alpha: float,
    limit: float,
    up_shift: float,
    limit_after: bool,
    is_gated: bool,
    max_rows: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`(out [T, H], h [R, W] or empty, u1 [P, r] or empty, *Plan)`."""
    activation = Activation(kind, alpha, limit, up_shift, limit_after, is_gated)
    top_k = top_k_index.shape[1]
    plan = make_plan(top_k_index, down_proj.shape[0], max_rows)
    layout = (is_transposed, is_interleaved)
    first = second = None
    if a1 is not None and b1 is not None:
        u1 = grouped_gemm(pad_rows(hidden_states, top_k, plan), a1, None, plan, k_is_last=True, is_padded=True)
        first = LowRankTerm(u1, b1, r_is_last=True)
    kept, gated = gate_up(
        hidden_states, gate_up_proj, gate_up_bias, plan, top_k, activation, *layout, max_rows, keep, first
    )
    if a2 is not None and b2 is not None:
        u2 = grouped_gemm(gated, a2, None, plan, k_is_last=True, is_padded=False)
        second = LowRankTerm(u2, b2, r_is_last=True)
    rows = grouped_gemm(gated, down_proj, down_bias, plan, not is_transposed, is_padded=False, added=second)
    u1 = first.rows if first is not None and keep else hidden_states.new_empty(0, 0)
    out = combine(rows, top_k_weights, plan, top_k)
    return out, kept, u1, plan.padded_of_slot, plan.slot_of_padded, plan.row_start, plan.tile_start, plan.tiles


@moe_adapted_forward.register_fake
def _(hidden_states, top_k_index, _weights, gate_up_proj, down_proj, _gate_up_bias, _down_bias, a1, *others):
    _b1, _a2, _b2, is_transposed, *_, max_rows, keep = others
    plan = empty_plan(top_k_index.numel(), down_proj.shape[0], max_rows, hidden_states.device)
    u1_shape = (plan.num_padded, a1.shape[1]) if a1 is not None and keep else (0, 0)
    return (
        torch.empty_like(hidden_states),
        hidden_states.new_empty(max_rows if keep else 0, gate_up_proj.shape[2 if is_transposed else 1]),
        hidden_states.new_empty(u1_shape),
        *plan,
    )


@torch.library.custom_op("patchgen::moe_adapted_backward", mutates_args=())
def moe_adapted_backward(
    grad_out: Tensor,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    down_bias: Tensor | None,
    a1: Tensor | None,
    b1: Tensor | None,
    a2: Tensor | None,
    b2: Tensor | None,
    kept: Tensor,
    u1: Tensor,
    padded_of_slot: Tensor,
    slot_of_padded: Tensor,
    row_start: Tensor,
    tile_start: Tensor,
    tiles: Tensor,
    is_transposed: bool,
    is_interleaved: bool,
    kind: str,
    alpha: float,
    limit: float,
    up_shift: float,
    limit_after: bool,
    is_gated: bool,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of x, routing weights and the four factors, in this order; empty if not `needed`, or without an adapter."""
    activation = Activation(kind, alpha, limit, up_shift, limit_after, is_gated)
    plan = Plan(padded_of_slot, slot_of_padded, row_start, tile_start, tiles)
    tensors = (grad_out, hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, down_bias)
    factors = (a1, b1, a2, b2)
    return _gradients(*tensors, factors, kept, u1, plan, activation, is_transposed, is_interleaved, needed)


def _gradients(
    grad_out: Tensor,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    down_bias: Tensor | None,
    factors: Factors,
    kept: Tensor,
    u1: Tensor,
    plan: Plan,
    activation: Activation,
    is_transposed: bool,
    is_interleaved: bool,
    needed: list[bool],
) -> list[Tensor]:
    """What `moe_adapted_backward` returns; an operator takes no groups such as the plan."""
    a1, b1, a2, b2 = factors
    top_k = top_k_weights.shape[1]
    need_x, need_weights = needed
    # An operator's outputs may not share memory, so what is not needed is an empty tensor each.
    grad_x, grad_weights, grad_a1, grad_b1, grad_a2, grad_b2 = (hidden_states.new_empty(0) for _ in range(6))

    copied = v1 = v2 = first = second = None
    if a2 is not None and b2 is not None:
        copied = pad_rows(grad_out, top_k, plan)
        v2 = grouped_gemm(copied, b2, None, plan, k_is_last=False, is_padded=True)
        second = LowRankTerm(v2, a2, r_is_last=False)
    grad_kept, weighted, partial = gate_backward_gemm(
        grad_out, copied, down_proj, kept, top_k_weights, plan, activation, is_transposed, is_interleaved, second
    )
    if need_weights:
        bias_terms = (None, None, None) if down_bias is None else (grad_out, top_k_index, down_bias)
        grad_weights = router_gradient(partial, plan, top_k, top_k_weights.dtype, *bias_terms)
    if a1 is not None and b1 is not None:
        v1 = grouped_gemm(grad_kept, b1, None, plan, k_is_last=False, is_padded=True)
        first = LowRankTerm(v1, a1, r_is_last=False)
    if need_x:
        rows = grouped_gemm(grad_kept, gate_up_proj, None, plan, is_transposed, is_padded=True, added=first)
        grad_x = combine(rows, None, plan, top_k)
        del rows
    if need_x and need_weights:
        early_gradients.hand_over(grad_x, grad_weights)
    if v1 is not None:
        grad_a1 = grouped_gemm_weights(hidden_states, None, v1, plan, top_k, tokens_first=False)
        grad_b1 = grouped_gemm_weights(u1, u1, grad_kept, plan, top_k, tokens_first=False)
    if a2 is not None and v2 is not None and copied is not None:
        weighted_u2 = grouped_gemm(weighted, a2, None, plan, k_is_last=True, is_padded=True)
        grad_a2 = grouped_gemm_weights(v2, v2, weighted, plan, top_k, tokens_first=True)
        grad_b2 = grouped_gemm_weights(grad_out, copied, weighted_u2, plan, top_k, tokens_first=True)
    return [grad_x, grad_weights, grad_a1, grad_b1, grad_a2, grad_b2]


@moe_adapted_backward.register_fake
def _(_grad_out, hidden_states, _index, top_k_weights, _gate_up_proj, _down_proj, _down_bias, a1, b1, a2, b2, *others):
    inputs = (hidden_states, top_k_weights, a1, b1, a2, b2)
    is_needed = (*others[-1], *(factor is not None for factor in (a1, b1, a2, b2)))
    return [
        tensor.new_empty(tensor.shape) if needed else hidden_states.new_empty(0)
        for tensor, needed in zip(inputs, is_needed, strict=True)
    ]


# --------------------------------------------------------------------------------------------- autograd

_NUM_TENSORS = 11  # of the forward's inputs
_GATE_UP_BIAS = 5  # which the backward does not read


def _setup_context(ctx, inputs, output) -> None:
    _, kept, u1, *plan = output
    tensors = inputs[:_GATE_UP_BIAS] + inputs[_GATE_UP_BIAS + 1 : _NUM_TENSORS]
    ctx.save_for_backward(*tensors, kept, u1, *plan)
    *ctx.options, _max_rows, ctx.keep = inputs[_NUM_TENSORS:]
    ctx.mark_non_differentiable(kept, u1, *plan)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, *_unused):
    none = [None] * (_NUM_TENSORS + len(ctx.options) + 2)
    if grad_out is None:
        return tuple(none)
    if not ctx.keep:
        raise RuntimeError("fused_moe ran without keeping what its backward needs: call it with gradients enabled.")
    needs_grad = ctx.needs_input_grad
    needed = [needs_grad[0], needs_grad[2]]
    gradients = torch.ops.patchgen.moe_adapted_backward(
        grad_out.contiguous(), *ctx.saved_tensors, *ctx.options, needed
    )
    for place, gradient in zip((0, 2, *range(7, _NUM_TENSORS)), gradients, strict=True):
        none[place] = gradient if needs_grad[place] else None
    return tuple(none)


moe_adapted_forward.register_autograd(_backward, setup_context=_setup_context)
