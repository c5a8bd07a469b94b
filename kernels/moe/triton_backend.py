"""The experts of one MoE layer in Triton: the `triton` backend, as two custom operators with an autograd formula.

    forward    plan -> gate_up -> grouped_gemm -> combine
    backward   gate_backward_gemm -> grouped_gemm -> combine;  grouped_gemm_weights twice;  router_gradient

Saved for the backward, besides the inputs and the routing: only the first projection `h [R, W]`. No step waits for the
device or adds atomically: the same inputs give the same bits. The operators have fake kernels, so
torch.compile traces through a layer without a break.

    T tokens   H hidden size   E experts   I expert intermediate size   K experts per token
    R rows: T * K, or the bound that the caller knows
    W = 2I with a gate, I without
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from patchgen.kernels.elementwise.activations import KINDS, Activation
from patchgen.kernels.moe import early_gradients
from patchgen.kernels.moe.bias_gradients import sum_padded_rows, sum_token_rows
from patchgen.kernels.moe.combine import combine, router_gradient
from patchgen.kernels.moe.gate_backward import gate_backward_gemm
from patchgen.kernels.moe.gate_up import gate_up
from patchgen.kernels.moe.grouped_gemm import grouped_gemm
from patchgen.kernels.moe.grouped_gemm_weights import grouped_gemm_weights
from patchgen.kernels.moe.options import MoeOptions
from patchgen.kernels.moe.pad_rows import pad_rows
from patchgen.kernels.moe.plan import Plan, empty_plan, make_plan
from patchgen.kernels.moe.schedule import copy_pays_off
from patchgen.kernels.moe.triton_adapters import factors_of
from patchgen.kernels.peers import pushed_sums
from patchgen.kernels.unsupported import UnsupportedOptionError

_MAX_EXPERTS = 2**14


def fused_moe_triton(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    options: MoeOptions,
) -> Tensor:
    """Shapes as in `runtime.ops.fused_moe`.

    Raises:
        UnsupportedOptionError: an option, a dtype or a size that the kernels do not have; see `unsupported`.
    """
    reason = unsupported(hidden_states, gate_up_proj, down_proj, options, (gate_up_bias, down_bias))
    if reason is not None:
        raise UnsupportedOptionError(
            f"fused_moe, backend 'triton': {reason} To fix: use fused_moe='torch' or 'eager' for this model."
        )
    activation = options.recognised()
    tensors = (hidden_states, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    tensors += options.adapters.tensors
    slots = top_k_index.numel()
    keep = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    operator, factors = torch.ops.patchgen.moe_forward, ()
    if options.adapters.tensors:
        operator, factors = torch.ops.patchgen.moe_adapted_forward, factors_of(options.adapters, options.is_transposed)
    return operator(
        hidden_states.contiguous(),
        top_k_index.contiguous(),
        top_k_weights.contiguous(),
        gate_up_proj,
        down_proj,
        None if gate_up_bias is None else gate_up_bias.contiguous(),
        None if down_bias is None else down_bias.contiguous(),
        *factors,
        options.is_transposed,
        options.is_interleaved,
        *_as_arguments(activation),
        slots if options.max_rows is None else min(slots, options.max_rows),
        keep,
    )[0]


# Chosen when the kernels are decorated; read once, for a compiled layer traces through `unsupported`.
_INTERPRETED = triton.knobs.runtime.interpret


def unsupported(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    options: MoeOptions,
    biases: tuple[Tensor | None, ...] = (),
) -> str | None:
    """Why the kernels cannot serve this call, in one sentence that names the option; None if they can."""
    trained = any(tensor is not None and tensor.requires_grad for tensor in (gate_up_proj, down_proj, *biases))
    if options.adapters.tensors and torch.is_grad_enabled() and trained:
        return "with adapters the weights and biases are frozen: the kernels have no gradient of theirs."
    if options.post_expert_norm is not None:
        return "post_expert_norm is not supported: the kernels do not hold a whole output row at once."
    if hidden_states.is_cuda:
        if torch.cuda.get_device_capability(hidden_states.device)[0] < 9:
            return "the kernels read by TMA and need compute capability 9.0 or newer."
        if hidden_states.dtype not in (torch.bfloat16, torch.float16):
            return f"dtype {hidden_states.dtype} is not supported, bfloat16 and float16 are."
    elif not _INTERPRETED:
        return f"the kernels need a CUDA device, the tensors are on {hidden_states.device}."
    elif hidden_states.dtype == torch.float64:
        return "dtype torch.float64 is not supported."
    hidden_size, inner = gate_up_proj.shape[1 if options.is_transposed else 2], down_proj.shape[2]
    if options.is_transposed:
        inner = down_proj.shape[1]
    for name, size in (("hidden size", hidden_size), ("expert intermediate size", inner)):
        if size % 8 != 0:
            return f"{name} {size} is not a multiple of 8, which the 16-byte copies need."
    if options.num_experts > _MAX_EXPERTS:
        return f"num_experts {options.num_experts} is more than {_MAX_EXPERTS}."
    if options.recognised() is None:
        return (
            f"the gate (activation={options.activation!r}, apply_gate={options.apply_gate!r}) is none of "
            f"{', '.join(KINDS)} with an optional clamp."
        )
    return None


def _as_arguments(activation: Activation) -> tuple[str, float, float, float, bool, bool]:
    return (
        activation.kind,
        activation.alpha,
        activation.limit,
        activation.up_shift,
        activation.limit_after,
        activation.is_gated,
    )


# -------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("patchgen::moe_forward", mutates_args=())
def _moe_forward(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`(out [T, H], h [R, W] or empty, *Plan)`."""
    activation = Activation(kind, alpha, limit, up_shift, limit_after, is_gated)
    top_k = top_k_index.shape[1]
    plan = make_plan(top_k_index, down_proj.shape[0], max_rows)
    layout = (is_transposed, is_interleaved)
    kept, gated = gate_up(hidden_states, gate_up_proj, gate_up_bias, plan, top_k, activation, *layout, max_rows, keep)
    rows = grouped_gemm(gated, down_proj, down_bias, plan, k_is_last=not is_transposed, is_padded=False)
    if (targets := pushed_sums.take_offer()) is not None:  # nothing reads these sums here
        pushed_sums.push(targets, rows, top_k_weights, plan.padded_of_slot, top_k)
        return torch.empty_like(hidden_states), kept, *plan
    return combine(rows, top_k_weights, plan, top_k), kept, *plan


@_moe_forward.register_fake
def _(
    hidden_states, top_k_index, _weights, gate_up_proj, down_proj, _gate_up_bias, _down_bias, is_transposed, *options
):
    *_, max_rows, keep = options
    return (
        torch.empty_like(hidden_states),
        hidden_states.new_empty(max_rows if keep else 0, gate_up_proj.shape[2 if is_transposed else 1]),
        *empty_plan(top_k_index.numel(), down_proj.shape[0], max_rows, hidden_states.device),
    )


@torch.library.custom_op("patchgen::moe_backward", mutates_args=())
def _moe_backward(
    grad_out: Tensor,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    kept: Tensor,
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
    """The gradients of x, routing weights, gate_up, down and the biases, in this order; empty if not `needed`, or deferred."""
    activation = Activation(kind, alpha, limit, up_shift, limit_after, is_gated)
    plan = Plan(padded_of_slot, slot_of_padded, row_start, tile_start, tiles)
    tensors = (grad_out, hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    return _gradients(*tensors, kept, plan, activation, is_transposed, is_interleaved, needed)


def _gradients(
    grad_out: Tensor,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    kept: Tensor,
    plan: Plan,
    activation: Activation,
    is_transposed: bool,
    is_interleaved: bool,
    needed: list[bool],
) -> list[Tensor]:
    """What `_moe_backward` returns; an operator takes no groups such as the plan."""
    top_k = top_k_weights.shape[1]
    need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias = needed
    # An operator's outputs may not share memory, so what is not needed is an empty tensor each.
    grad_x, grad_weights, grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias = (
        hidden_states.new_empty(0) for _ in needed
    )

    num_experts, inner, width = plan.num_experts, down_proj.shape[1 if is_transposed else 2], kept.shape[1]
    # Made for the gradient of `down`, the copy serves the product before it too.
    copied = None
    if need_down and copy_pays_off(kept.shape[0], num_experts, inner):
        copied = pad_rows(grad_out, top_k, plan)
    grad_kept, weighted, partial = gate_backward_gemm(
        grad_out, copied, down_proj, kept, top_k_weights, plan, activation, is_transposed, is_interleaved
    )
    if need_weights:
        bias_terms = (None, None, None) if down_bias is None else (grad_out, top_k_index, down_bias)
        grad_weights = router_gradient(partial, plan, top_k, top_k_weights.dtype, *bias_terms)
    tokens_first = need_x and need_weights and early_gradients.is_awaited()
    if not tokens_first:
        if need_down:
            grad_down = grouped_gemm_weights(grad_out, copied, weighted, plan, top_k, tokens_first=not is_transposed)
        copied = weighted = None
    if need_x:  # before the largest gradient is allocated: its rows are freed again
        rows = grouped_gemm(grad_kept, gate_up_proj, None, plan, k_is_last=is_transposed, is_padded=True)
        grad_x = combine(rows, None, plan, top_k)
        del rows
    if tokens_first:
        early_gradients.hand_over(grad_x, grad_weights)
        factors = grad_out, copied, weighted, plan, top_k, not is_transposed
        if need_down and not early_gradients.defer(down_proj, lambda: grouped_gemm_weights(*factors)):
            grad_down = grouped_gemm_weights(*factors)
        copied = weighted = None
    if need_down_bias:
        grad_down_bias = sum_token_rows(grad_out, top_k_weights, plan, down_bias.dtype)
    if need_gate_up:
        copied = pad_rows(hidden_states, top_k, plan) if copy_pays_off(kept.shape[0], num_experts, width) else None
        grad_gate_up = grouped_gemm_weights(hidden_states, copied, grad_kept, plan, top_k, tokens_first=is_transposed)
        del copied
    if need_gate_up_bias:
        grad_gate_up_bias = sum_padded_rows(grad_kept, plan, gate_up_bias.dtype)
    return [grad_x, grad_weights, grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias]


@_moe_backward.register_fake
def _(_grad_out, hidden_states, _index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias, *others):
    inputs = (hidden_states, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    return [
        tensor.new_empty(tensor.shape) if is_needed else hidden_states.new_empty(0)
        for tensor, is_needed in zip(inputs, others[-1], strict=True)
    ]


# --------------------------------------------------------------------------------------------- autograd

_NUM_TENSORS = 7


def _setup_context(ctx, inputs, output) -> None:
    _, kept, *plan = output
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], kept, *plan)
    ctx.down_shape = inputs[4].shape
    *ctx.options, _max_rows, ctx.keep = inputs[_NUM_TENSORS:]
    ctx.mark_non_differentiable(kept, *plan)
    ctx.set_materialize_grads(False)  # else each call fills a gradient of zeros for `kept`


def _backward(ctx, grad_out, *_unused):
    if grad_out is None:
        return (None,) * (_NUM_TENSORS + len(ctx.options) + 2)
    if not ctx.keep:
        raise RuntimeError("fused_moe ran without keeping what its backward needs: call it with gradients enabled.")
    needs_grad = ctx.needs_input_grad
    needed = [needs_grad[0], *needs_grad[2:7]]
    gradients = torch.ops.patchgen.moe_backward(grad_out.contiguous(), *ctx.saved_tensors, *ctx.options, needed)
    x, weights, gate_up_proj, down_proj, gate_up_bias, down_bias = (
        gradient if want else None for gradient, want in zip(gradients, needed, strict=True)
    )
    if down_proj is not None and down_proj.shape != ctx.down_shape:  # deferred
        down_proj = None
    # In the order of the operator's inputs; the routing indices and the options have none.
    return x, None, weights, gate_up_proj, down_proj, gate_up_bias, down_bias, *([None] * (len(ctx.options) + 2))


_moe_forward.register_autograd(_backward, setup_context=_setup_context)
