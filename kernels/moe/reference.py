"""The experts of one MoE layer, expert by expert: the reference for all other implementations.

T tokens   H hidden size   E experts   I expert intermediate size   K experts per token   R rows of one expert
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchgen.kernels.moe.adapters import LowRank
from patchgen.kernels.moe.options import MoeOptions


def reference(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    options: MoeOptions,
) -> Tensor:
    """`sum_k weight[t, k] * down[e](gate(gate_up[e](x[t])))` with `e = index[t, k]`, in the dtype of its inputs.

    Differentiable in every floating-point argument; with fp64 inputs it is the reference of the tests. Shapes as in
    `runtime.ops.fused_moe`. Waits for the device once per expert.
    """
    out_TH = torch.zeros_like(hidden_states)
    for expert in range(options.num_experts):
        token_R, slot_R = torch.where(top_k_index == expert)
        first, second = options.adapters
        gate_up_R2I = _linear(hidden_states[token_R], gate_up_proj[expert], gate_up_bias, first, expert, options)
        rows_RH = _linear(options.gate(gate_up_R2I), down_proj[expert], down_bias, second, expert, options)
        if options.post_expert_norm is not None:
            rows_RH = options.post_expert_norm(rows_RH)
        weighted_RH = rows_RH * top_k_weights[token_R, slot_R, None]
        out_TH = out_TH.index_add(0, token_R, weighted_RH.to(out_TH.dtype))
    return out_TH


def _linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, adapter: LowRank | None, expert: int, options: MoeOptions
) -> Tensor:
    product = rows @ (weight if options.is_transposed else weight.T)
    if adapter is not None:
        a_ErK, b_ENr = adapter.factors(options.is_transposed)
        product = product + adapter.scale * (rows @ a_ErK[expert].T) @ b_ENr[expert].T
    return product if bias is None else product + bias[expert]
