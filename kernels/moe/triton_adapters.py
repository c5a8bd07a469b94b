"""The experts of one MoE layer with low-rank adapters beside frozen weights, in Triton: two operators as in `triton_backend`.

    forward    plan -> u1 = x a1^T  -> gate_up (+ u1 b1^T)  -> u2 = a a2^T -> grouped_gemm (+ u2 b2^T) -> combine
    backward   v2 = grad b2 -> gate_backward_gemm (+ v2 a2) -> v1 = dh b1  -> grouped_gemm (+ v1 a1)   -> combine
               then the gradients of the four factors, and of the routing weights; none of the weights

What is in brackets the kernels of the weights add as further steps of the depth of their tiles (`plan.Added`): a thin
product of the width of the weight never exists in memory. Kept for the backward beside what `triton_backend` keeps: u1.

    P padded rows   r rank   W = 2I with a gate, I without   a1 [E, r, H]   b1 [E, W, r]   a2 [E, r, I]   b2 [E, H, r]
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
from patchgen.kernels.moe.plan import BLOCK_M, Added, Plan, make_plan, max_tiles

Factors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def factors_of(adapters: ExpertAdapters, is_transposed: bool) -> Factors:
    """`(a1, b1, a2, b2)`, contiguous, their scale in b; None where a weight has no adapter."""

    def both(added: LowRank | None) -> tuple[Tensor | None, Tensor | None]:
        if added is None:
            return None, None
        a, b = added.filled_up().factors(is_transposed)
        return a.contiguous(), (b * added.scale).contiguous()

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
        first = Added(u1, b1, r_is_last=True)
    kept, gated = gate_up(
        hidden_states, gate_up_proj, gate_up_bias, plan, top_k, activation, *layout, max_rows, keep, first
    )
    if a2 is not None and b2 is not None:
        u2 = grouped_gemm(gated, a2, None, plan, k_is_last=True, is_padded=False)
        second = Added(u2, b2, r_is_last=True)
    rows = grouped_gemm(gated, down_proj, down_bias, plan, not is_transposed, is_padded=False, added=second)
    u1 = first.rows if first is not None and keep else hidden_states.new_empty(0, 0)
    out = combine(rows, top_k_weights, plan, top_k)
    return out, kept, u1, plan.padded_of_slot, plan.slot_of_padded, plan.row_start, plan.tile_start, plan.tiles


@moe_adapted_forward.register_fake
def _(
    hidden_states,
    top_k_index,
    top_k_weights,
    gate_up_proj,
    down_proj,
    gate_up_bias,
    down_bias,
    a1,
    b1,
    a2,
    b2,
    is_transposed,
    is_interleaved,
    kind,
    alpha,
    limit,
    up_shift,
    limit_after,
    is_gated,
    max_rows,
    keep,
):
    num_experts, width = down_proj.shape[0], gate_up_proj.shape[2 if is_transposed else 1]
    num_tiles = max_tiles(max_rows, num_experts)

    def numbers(*shape: int) -> Tensor:
        return hidden_states.new_empty(shape, dtype=torch.int32)

    return (
        torch.empty_like(hidden_states),
        hidden_states.new_empty(max_rows if keep else 0, width),
        hidden_states.new_empty(num_tiles * BLOCK_M, a1.shape[1])
        if a1 is not None and keep
        else hidden_states.new_empty(0, 0),
        numbers(top_k_index.numel()),
        numbers(num_tiles * BLOCK_M),
        numbers(num_experts + 1),
        numbers(num_experts + 1),
        numbers(3, num_tiles),
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
    wanted: list[bool],
) -> list[Tensor]:
    """The gradients of x, weights and the four factors, in this order; x and weights as `wanted`, empty where not."""
    activation = Activation(kind, alpha, limit, up_shift, limit_after, is_gated)
    plan = Plan(padded_of_slot, slot_of_padded, row_start, tile_start, tiles)
    top_k = top_k_weights.shape[1]
    want_x, want_weights = wanted
    # An operator's outputs may not share memory, so what is not wanted is an empty tensor each.
    grad_x, grad_weights, grad_a1, grad_b1, grad_a2, grad_b2 = (hidden_states.new_empty(0) for _ in range(6))

    copied = v1 = v2 = first = second = None
    if a2 is not None and b2 is not None:
        copied = pad_rows(grad_out, top_k, plan)
        v2 = grouped_gemm(copied, b2, None, plan, k_is_last=False, is_padded=True)
        second = Added(v2, a2, r_is_last=False)
    grad_kept, weighted, partial = gate_backward_gemm(
        grad_out, copied, down_proj, kept, top_k_weights, plan, activation, is_transposed, is_interleaved, second
    )
    if want_weights:
        bias_terms = (None, None, None) if down_bias is None else (grad_out, top_k_index, down_bias)
        grad_weights = router_gradient(partial, plan, top_k, top_k_weights.dtype, *bias_terms)
    if a1 is not None and b1 is not None:
        v1 = grouped_gemm(grad_kept, b1, None, plan, k_is_last=False, is_padded=True)
        first = Added(v1, a1, r_is_last=False)
    if want_x:
        rows = grouped_gemm(grad_kept, gate_up_proj, None, plan, is_transposed, is_padded=True, added=first)
        grad_x = combine(rows, None, plan, top_k)
        del rows
    if want_x and want_weights:
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
def _(
    grad_out,
    hidden_states,
    top_k_index,
    top_k_weights,
    gate_up_proj,
    down_proj,
    down_bias,
    a1,
    b1,
    a2,
    b2,
    kept,
    u1,
    padded_of_slot,
    slot_of_padded,
    row_start,
    tile_start,
    tiles,
    is_transposed,
    is_interleaved,
    kind,
    alpha,
    limit,
    up_shift,
    limit_after,
    is_gated,
    wanted,
):
    inputs = (hidden_states, top_k_weights, a1, b1, a2, b2)
    asked = (*wanted, *(factor is not None for factor in (a1, b1, a2, b2)))
    return [
        tensor.new_empty(tensor.shape) if want else hidden_states.new_empty(0)
        for tensor, want in zip(inputs, asked, strict=True)
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
    needed = ctx.needs_input_grad
    wanted = [needed[0], needed[2]]
    gradients = torch.ops.patchgen.moe_adapted_backward(
        grad_out.contiguous(), *ctx.saved_tensors, *ctx.options, wanted
    )
    for place, gradient in zip((0, 2, *range(7, _NUM_TENSORS)), gradients, strict=True):
        none[place] = gradient if needed[place] else None
    return tuple(none)


moe_adapted_forward.register_autograd(_backward, setup_context=_setup_context)
