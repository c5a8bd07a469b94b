"""The experts of one MoE layer around torch's grouped matrix product: the `torch` backend.

Rows are the (token, slot) pairs sorted by expert. The steps, with the tensors that autograd keeps marked by *:

    gather     x [T, H]             -> rows* [R, H]     backward: each token sums its K rows
    grouped    rows @ gate_up[e]    -> h* [R, 2I]
    gate       act(gate) * up * w   -> a* [R, I]        one compiled kernel on a GPU, and one in the backward
    grouped    a @ down[e]          -> y [R, H]
    combine    sum_k y[row(t, k)]   -> out [T, H]       backward: each row reads its token

Expert counts stay on the device. Slots that are left out sort to the tail, past the last expert: the grouped products
neither read nor write there, so what the tail holds is arbitrary, in the backward too. Every sum over rows of our own
skips it; around a function of the model, whose parameters sum over all rows, it is zero.

    T tokens   H hidden size   E experts   I expert intermediate size   K experts per token   R = T * K rows
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from patchgen.kernels import packages
from patchgen.kernels.elementwise import activations
from patchgen.kernels.elementwise.activations import Activation
from patchgen.kernels.moe.adapters import add_low_rank
from patchgen.kernels.moe.grouped_product import grouped_product, sum_per_expert
from patchgen.kernels.moe.options import MoeOptions


def fused_moe_torch(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    options: MoeOptions,
) -> Tensor:
    """Shapes as in `runtime.ops.fused_moe`. Deterministic; on a GPU without a wait for the device.

    Raises:
        ValueError: on a GPU, a dtype or a row length that torch's grouped product does not take.
    """
    num_experts = options.num_experts
    # One-byte keys sort in one radix pass; the stable sort keeps the rows of an expert in token order.
    keys = top_k_index.reshape(-1).to(torch.uint8 if num_experts < 256 else torch.int16)
    sorted_keys, slot_of_row_R = torch.sort(keys, stable=True)
    expert_R = sorted_keys.to(torch.int32)
    ends_E = torch.searchsorted(
        expert_R, torch.arange(num_experts, device=expert_R.device, dtype=torch.int32), right=True
    ).to(torch.int32)
    row_of_slot_TK = torch.empty_like(slot_of_row_R)
    row_of_slot_TK[slot_of_row_R] = torch.arange(slot_of_row_R.numel(), device=expert_R.device)
    row_of_slot_TK = row_of_slot_TK.view(top_k_index.shape)
    left_out_TK = top_k_index >= num_experts
    token_of_row_R = slot_of_row_R // top_k_index.shape[1]
    in_use_R1 = (expert_R < num_experts).unsqueeze(1)

    rows_RH = _Gather.apply(hidden_states, token_of_row_R, row_of_slot_TK, left_out_TK)
    weight_R1 = _Gather.apply(
        top_k_weights.reshape(-1, 1), slot_of_row_R, row_of_slot_TK.reshape(-1, 1), left_out_TK.reshape(-1, 1)
    )
    gate_up_R2I = _linear(rows_RH, gate_up_proj, gate_up_bias, ends_E, expert_R, options.is_transposed)
    gate_up_R2I = add_low_rank(gate_up_R2I, rows_RH, options.adapters.gate_up, ends_E, options.is_transposed)
    # The routing weight commutes with the down projection, unless something is added or normalised after it.
    weight_before = down_bias is None and options.post_expert_norm is None
    gated_RI = _gate(gate_up_R2I, weight_R1 if weight_before else None, in_use_R1, options)
    out_RH = _linear(gated_RI, down_proj, down_bias, ends_E, expert_R, options.is_transposed)
    out_RH = add_low_rank(out_RH, gated_RI, options.adapters.down, ends_E, options.is_transposed)
    if options.post_expert_norm is not None:
        out_RH = _zero_tail(options.post_expert_norm(_fill_tail(out_RH, in_use_R1)), in_use_R1)
    if not weight_before:
        out_RH = (out_RH * weight_R1).to(out_RH.dtype)
    return _Combine.apply(out_RH, token_of_row_R, row_of_slot_TK, left_out_TK)


# ------------------------------------------------------------------------------------------ permutations


def _sum_of_rows(rows_RH: Tensor, row_of_slot_TK: Tensor, left_out_TK: Tensor) -> Tensor:
    """`[T, H]`: the sum over k of `rows[row_of_slot[t, k]]`, slots that are left out counting nothing."""
    dtype = torch.promote_types(rows_RH.dtype, torch.float32)
    gathered_TKH = rows_RH[row_of_slot_TK].to(dtype)
    return torch.where(left_out_TK.unsqueeze(-1), 0, gathered_TKH).sum(dim=1).to(rows_RH.dtype)


def _reduce(rows_RH: Tensor, row_of_slot_TK: Tensor, left_out_TK: Tensor) -> Tensor:
    if not rows_RH.is_cuda or rows_RH.shape[1] == 1:
        return _sum_of_rows(rows_RH, row_of_slot_TK, left_out_TK)
    _only_rows_vary(rows_RH, row_of_slot_TK, left_out_TK)
    return _compiled_sum_of_rows()(rows_RH, row_of_slot_TK, left_out_TK)


@functools.cache
def _compiled_sum_of_rows():
    return packages.compiled(_sum_of_rows)


def _only_rows_vary(*tensors: Tensor | None) -> None:
    """Makes the number of rows the variable of the compiled code, and every other size a constant.

    Left to itself, torch.compile turns every size that differed once, between two models say, into a variable, and
    loses wide loads and unrolling (gpt_oss dimensions on an H200: 21.2 ms against 18.2). And it compiles once for
    the first number of rows and once more for others, until it reaches its limit of recompilations and stops.
    """
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            if tensor is not None:
                torch._dynamo.mark_static(tensor, 1)
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


class _Gather(torch.autograd.Function):
    """`tokens[token_of_row]`, whose gradient sums each token's own rows in a fixed order, not atomically."""

    @staticmethod
    def forward(ctx, tokens_TH, token_of_row_R, row_of_slot_TK, left_out_TK):
        ctx.save_for_backward(row_of_slot_TK, left_out_TK)
        return tokens_TH.index_select(0, token_of_row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RH):
        row_of_slot_TK, left_out_TK = ctx.saved_tensors
        return _reduce(grad_RH, row_of_slot_TK, left_out_TK), None, None, None


class _Combine(torch.autograd.Function):
    """`out[t] = sum_k rows[row_of_slot[t, k]]`, in fp32; each row's gradient is its token's."""

    @staticmethod
    def forward(ctx, rows_RH, token_of_row_R, row_of_slot_TK, left_out_TK):
        ctx.save_for_backward(token_of_row_R)
        return _reduce(rows_RH, row_of_slot_TK, left_out_TK)

    @staticmethod
    def backward(ctx, grad_TH):
        (token_of_row_R,) = ctx.saved_tensors
        return grad_TH.index_select(0, token_of_row_R), None, None, None


# ------------------------------------------------------------------------------------------------- gate


def _fill_tail(rows: Tensor, in_use_R1: Tensor) -> Tensor:
    """The rows with distinct numbers in the tail: of zeros or equal ones, a norm has no derivative, and 0 * inf is no 0."""
    numbers = torch.linspace(1, 2, rows.shape[-1], dtype=rows.dtype, device=rows.device)
    return torch.where(in_use_R1, rows, numbers)


def _zero_tail(rows: Tensor, in_use_R1: Tensor) -> Tensor:
    """The rows with zeros in the tail; so is their gradient."""
    return torch.where(in_use_R1, rows, 0)


def _gate(gate_up_R2I: Tensor, weight_R1: Tensor | None, in_use_R1: Tensor, options: MoeOptions) -> Tensor:
    recognised = options.recognised() if gate_up_R2I.is_cuda else None
    if recognised is not None:
        _only_rows_vary(gate_up_R2I, weight_R1)
        return _compiled_gate(recognised, options.is_interleaved)(gate_up_R2I, weight_R1)
    gated_RI = _zero_tail(options.gate(_fill_tail(gate_up_R2I, in_use_R1)), in_use_R1)
    return gated_RI if weight_R1 is None else (gated_RI * weight_R1).to(gated_RI.dtype)


@functools.cache
def _compiled_gate(activation: Activation, is_interleaved: bool):
    """One compiled function per formula, not per layer: layers have an activation module each."""

    def gate(gate_up_R2I: Tensor, weight_R1: Tensor | None) -> Tensor:
        wide_R2I = gate_up_R2I.float()
        if activation.is_gated:
            gated_RI = activation.gate(*activations.split_gate_up(wide_R2I, is_interleaved))
        else:
            gated_RI = activation.activate(wide_R2I)
        if weight_R1 is not None:
            gated_RI = gated_RI * weight_R1
        return gated_RI.to(gate_up_R2I.dtype)

    return packages.compiled(gate)


# --------------------------------------------------------------------------------------- grouped product


def _linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ends_E: Tensor, expert_R: Tensor, is_transposed: bool
) -> Tensor:
    product = grouped_product(rows, weight if is_transposed else weight.transpose(-2, -1), ends_E)
    return product if bias is None else _AddBias.apply(product, bias, ends_E, expert_R)


class _AddBias(torch.autograd.Function):
    """`rows[r] + bias[expert of r]`; the bias gradient is a grouped product with ones: fixed order, skips the tail."""

    @staticmethod
    def forward(ctx, rows, bias, ends_E, expert_R):
        ctx.save_for_backward(ends_E)
        ctx.bias_dtype = bias.dtype
        with_tail = torch.cat((bias, bias.new_zeros(1, bias.shape[1])))
        return rows + with_tail[expert_R.clamp(max=bias.shape[0])].to(rows.dtype)

    @staticmethod
    def backward(ctx, grad):
        (ends_E,) = ctx.saved_tensors
        num_experts = ends_E.numel()
        if grad.is_cuda:
            grad_bias = sum_per_expert(grad, ends_E)
        else:
            rows = torch.arange(grad.shape[0])
            expert_R = torch.searchsorted(ends_E, rows, right=True)
            sums = grad.new_zeros(num_experts + 1, grad.shape[1])
            valid = (expert_R < num_experts).unsqueeze(1)
            grad_bias = sums.index_add(0, expert_R, torch.where(valid, grad, 0))[:num_experts]
        return grad, grad_bias.to(ctx.bias_dtype), None, None
