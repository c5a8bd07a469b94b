"""The experts of one MoE layer with all six products in FP8: the `fp8` backend, as two custom operators.

    forward    plan -> tokens and weights to FP8 -> product -> gate, to FP8 -> product -> combine
    backward   output gradients and weights to FP8 -> product -> gate's gradient, to FP8 -> product -> combine;
               both factors of each weight gradient transposed, two products over rows; or, `fp8_wide_gradients`,
               those products as in the `triton` backend, of factors that FP8 did not round

Weights, their gradients, the router's gradient and all sums over slots are as in the `triton` backend. Weights are quantised
in each forward, and in each backward in the other orientation, unless their owner keeps both (`fp8_kept`). Saved for the
backward, besides the inputs and the routing: the first projection and the scales of the tokens. The same inputs give the
same bits.

    T tokens   H hidden size   E experts   I expert intermediate size   K experts per token   P padded rows
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchgen.kernels.elementwise.activations import Activation
from patchgen.kernels.moe import early_gradients, fp8_kept
from patchgen.kernels.moe.combine import combine, router_gradient
from patchgen.kernels.moe.fp8_gate import fp8_gate, fp8_gate_backward
from patchgen.kernels.moe.fp8_product import fp8_product, fp8_weight_gradient
from patchgen.kernels.moe.fp8_values import quantise_tokens, transpose_rows, transpose_tokens
from patchgen.kernels.moe.grouped_gemm_weights import grouped_gemm_weights
from patchgen.kernels.moe.options import MoeOptions
from patchgen.kernels.moe.pad_rows import pad_rows
from patchgen.kernels.moe.plan import Plan, empty_plan, make_plan
from patchgen.kernels.moe.schedule import copy_pays_off
from patchgen.kernels.moe.triton_backend import unsupported as unsupported_by_triton
from patchgen.kernels.peers import pushed_sums
from patchgen.kernels.unsupported import UnsupportedOptionError

_PIECE = 16
"""Sizes are multiples of this: TMA copies 16 bytes."""


def fused_moe_fp8(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    options: MoeOptions,
    wide_gradients: bool = False,
) -> Tensor:
    """Shapes as in `runtime.ops.fused_moe`.

    Args:
        wide_gradients: both weight gradients are computed in the dtype of the layer, from factors that FP8 did not round.

    Raises:
        UnsupportedOptionError: an option, a dtype or a size that the kernels do not have; see `unsupported`.
    """
    reason = unsupported(hidden_states, gate_up_proj, down_proj, options, (gate_up_bias, down_bias))
    if reason is not None:
        raise UnsupportedOptionError(
            f"fused_moe, backend 'fp8': {reason} To fix: use fused_moe='auto' for this model, whose experts stay in its dtype."
        )
    activation = options.recognised()
    assert activation is not None  # else refused
    slots = top_k_index.numel()
    tensors = (hidden_states, top_k_weights, gate_up_proj, down_proj)
    return torch.ops.patchgen.moe_fp8_forward(
        hidden_states.contiguous(),
        top_k_index.contiguous(),
        top_k_weights.contiguous(),
        gate_up_proj,
        down_proj,
        activation.kind,
        activation.alpha,
        activation.limit,
        activation.up_shift,
        activation.limit_after,
        wide_gradients,
        slots if options.max_rows is None else min(slots, options.max_rows),
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
    )[0]


def unsupported(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    options: MoeOptions,
    biases: tuple[Tensor | None, ...] = (),
) -> str | None:
    """Why the kernels cannot serve this call, in one sentence that names the option; None if they can."""
    if options.adapters.tensors:
        return "low-rank adapters are not supported."
    if any(bias is not None for bias in biases):
        return "biases of experts are not supported."
    if options.is_transposed or options.is_interleaved or not options.is_gated:
        return (
            f"weights must be stacked as [E, 2I, H], gate first, and [E, H, I]; found is_transposed={options.is_transposed}, "
            f"is_interleaved={options.is_interleaved}, is_gated={options.is_gated}."
        )
    for name, size in (("hidden size", gate_up_proj.shape[2]), ("expert intermediate size", down_proj.shape[2])):
        if size % _PIECE != 0:
            return f"{name} {size} is not a multiple of {_PIECE}, which the 16-byte copies need."
    return unsupported_by_triton(hidden_states, gate_up_proj, down_proj, options)


# -------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("patchgen::moe_fp8_forward", mutates_args=())
def _moe_fp8_forward(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    kind: str,
    alpha: float,
    limit: float,
    up_shift: float,
    limit_after: bool,
    _wide_gradients: bool,
    max_rows: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`(out [T, H], h [P, 2I] or empty, scales of the tokens [T], of gate_up [E, 2I] and of down [E, H], *Plan)`."""
    activation = Activation(kind, alpha, limit, up_shift, limit_after, True)
    top_k, dtype = top_k_index.shape[1], hidden_states.dtype
    plan = make_plan(top_k_index, down_proj.shape[0], max_rows)
    tokens, scales = quantise_tokens(hidden_states, plan, top_k)
    gate_up = fp8_kept.rows_of(gate_up_proj)
    projected = fp8_product(tokens, gate_up, plan, dtype)
    gate_up_scales = gate_up.scales
    del tokens, gate_up
    gated = fp8_gate(projected, plan, activation)
    kept = projected if keep else projected.new_empty(0, projected.shape[1])
    del projected
    down = fp8_kept.rows_of(down_proj)
    rows = fp8_product(gated, down, plan, dtype)
    of_plan = (plan.padded_of_slot, plan.slot_of_padded, plan.row_start, plan.tile_start, plan.tiles)
    others = (scales, gate_up_scales, down.scales, *of_plan)
    if (targets := pushed_sums.take_offer()) is not None:  # nothing reads these sums here
        pushed_sums.push(targets, rows, top_k_weights, plan.padded_of_slot, top_k)
        return torch.empty_like(hidden_states), kept, *others
    return combine(rows, top_k_weights, plan, top_k), kept, *others


@_moe_fp8_forward.register_fake
def _(hidden_states, top_k_index, _weights, gate_up_proj, down_proj, *options):
    *_, max_rows, keep = options
    plan = empty_plan(top_k_index.numel(), down_proj.shape[0], max_rows, hidden_states.device)
    return (
        torch.empty_like(hidden_states),
        hidden_states.new_empty(plan.num_padded if keep else 0, gate_up_proj.shape[1]),
        *(
            hidden_states.new_empty(shape, dtype=torch.float32)
            for shape in (hidden_states.shape[:1], gate_up_proj.shape[:2], down_proj.shape[:2])
        ),
        *plan,
    )


@torch.library.custom_op("patchgen::moe_fp8_backward", mutates_args=())
def _moe_fp8_backward(
    grad_out: Tensor,
    hidden_states: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    kept: Tensor,
    scales: Tensor,
    gate_up_scales: Tensor,
    down_scales: Tensor,
    padded_of_slot: Tensor,
    slot_of_padded: Tensor,
    row_start: Tensor,
    tile_start: Tensor,
    tiles: Tensor,
    kind: str,
    alpha: float,
    limit: float,
    up_shift: float,
    limit_after: bool,
    wide_gradients: bool,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of x, routing weights, gate_up and down, in this order; empty if not `needed`, or deferred."""
    activation = Activation(kind, alpha, limit, up_shift, limit_after, True)
    plan = Plan(padded_of_slot, slot_of_padded, row_start, tile_start, tiles)
    top_k, dtype = top_k_weights.shape[1], hidden_states.dtype
    need_x, need_weights, need_gate_up, need_down = needed
    # An operator's outputs may not share memory, so what is not needed is an empty tensor each.
    grad_x, grad_weights, grad_gate_up, grad_down = (hidden_states.new_empty(0) for _ in needed)

    grads, grad_scales = quantise_tokens(grad_out, plan, top_k)
    grad_gated = fp8_product(grads, fp8_kept.transposed_of(down_proj, down_scales), plan, dtype)
    del grads
    grad_kept, weighted, wide, partial = fp8_gate_backward(
        grad_gated, kept, top_k_weights, plan, activation, wide_gradients
    )
    del grad_gated
    if need_weights:
        grad_weights = router_gradient(partial, plan, top_k, top_k_weights.dtype, None, None, None)
    if need_x:
        rows = fp8_product(grad_kept, fp8_kept.transposed_of(gate_up_proj, gate_up_scales), plan, dtype)
        grad_x = combine(rows, None, plan, top_k)
        del rows
    tokens_first = need_x and need_weights and early_gradients.is_awaited()
    if tokens_first:
        early_gradients.hand_over(grad_x, grad_weights)
    if need_down:

        def down_gradient() -> Tensor:
            if wide is not None:
                return _wide_gradient(grad_out, wide[1], plan, top_k, tokens_first=True)
            assert weighted is not None  # one of the two
            right, of_expert = transpose_rows(weighted, grad_scales, plan, top_k)
            left = transpose_tokens(grad_out, grad_scales, plan, top_k)
            return fp8_weight_gradient(left, right, of_expert, plan, dtype)

        if not (tokens_first and early_gradients.defer(down_proj, down_gradient)):
            grad_down = down_gradient()
    if need_gate_up and wide is not None:
        grad_gate_up = _wide_gradient(hidden_states, wide[0], plan, top_k, tokens_first=False)
    elif need_gate_up:
        left, of_expert = transpose_rows(grad_kept, scales, plan, top_k)
        del grad_kept
        right = transpose_tokens(hidden_states, scales, plan, top_k)
        grad_gate_up = fp8_weight_gradient(left, right, of_expert, plan, dtype)
    return [grad_x, grad_weights, grad_gate_up, grad_down]


def _wide_gradient(tokens: Tensor, padded: Tensor, plan: Plan, top_k: int, *, tokens_first: bool) -> Tensor:
    """As the `triton` backend computes it."""
    pays_off = copy_pays_off(plan.num_rows, plan.num_experts, padded.shape[1])
    copied = pad_rows(tokens, top_k, plan) if pays_off else None
    return grouped_gemm_weights(tokens, copied, padded, plan, top_k, tokens_first=tokens_first)


@_moe_fp8_backward.register_fake
def _(_grad_out, hidden_states, top_k_weights, gate_up_proj, down_proj, *others):
    inputs = (hidden_states, top_k_weights, gate_up_proj, down_proj)
    return [
        tensor.new_empty(tensor.shape) if is_needed else hidden_states.new_empty(0)
        for tensor, is_needed in zip(inputs, others[-1], strict=True)
    ]


# --------------------------------------------------------------------------------------------- autograd

_NUM_TENSORS = 5


def _setup_context(ctx, inputs, output) -> None:
    _, kept, *others = output
    hidden_states, _index, *tensors = inputs[:_NUM_TENSORS]
    ctx.save_for_backward(hidden_states, *tensors, kept, *others)
    ctx.down_shape = inputs[4].shape
    *ctx.options, _max_rows, ctx.keep = inputs[_NUM_TENSORS:]
    ctx.mark_non_differentiable(kept, *others)
    ctx.set_materialize_grads(False)  # else each call fills a gradient of zeros for `kept`


def _backward(ctx, grad_out, *_unused):
    num_others = len(ctx.options) + 2
    if grad_out is None:
        return (None,) * (_NUM_TENSORS + num_others)
    if not ctx.keep:
        raise RuntimeError("fused_moe ran without keeping what its backward needs: call it with gradients enabled.")
    needed = [ctx.needs_input_grad[place] for place in (0, 2, 3, 4)]
    gradients = torch.ops.patchgen.moe_fp8_backward(grad_out.contiguous(), *ctx.saved_tensors, *ctx.options, needed)
    x, weights, gate_up_proj, down_proj = (
        gradient if want else None for gradient, want in zip(gradients, needed, strict=True)
    )
    if down_proj is not None and down_proj.shape != ctx.down_shape:  # deferred
        down_proj = None
    return x, None, weights, gate_up_proj, down_proj, *([None] * num_others)


_moe_fp8_forward.register_autograd(_backward, setup_context=_setup_context)
