"""Expert parallelism: each rank has a part of the experts, and tokens are exchanged between ranks.

Two exchanges behind one function, chosen by `expert_exchange` of `ParallelState.create`:

    all_to_all     a row per slot, by NCCL or gloo (`expert_rows.py`): between any ranks
    peer_memory    ranks of one machine read each other's tokens, each once (`expert_peers.py`): no host sync
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from patchgen.kernels.moe import early_gradients
from patchgen.kernels.moe.adapters import ExpertAdapters, LowRank
from patchgen.runtime import seams
from patchgen.runtime.experts_interface import SEAM, experts_kernel
from patchgen.runtime.parallel.expert_rows import dropped_rows, exchange_by_all_to_all
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.uncompiled import uncompiled

__all__ = ["dropped_rows", "fused_moe"]
_PUSHING = ("auto", "triton", "fp8", "fp8_wide_gradients")  # return what kernels computed, and can push it instead


@uncompiled
def fused_moe(
    state: ParallelState,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    num_experts: int,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
    **options: object,
) -> Tensor:
    """`ops.fused_moe` over the experts of all ranks; index and `num_experts` are the model's, expert parameters this rank's."""
    num_local = num_experts // state.ep
    gate_up_e, down_e = _local_experts(gate_up_proj, num_local), _local_experts(down_proj, num_local)
    biases = {
        name: None if bias is None else _local_experts(bias, num_local)
        for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias))
    }
    if adapters is not None:
        options["adapters"] = ExpertAdapters(*(_local_factors(adapter, num_local) for adapter in adapters))
    compute = partial(experts_kernel(), num_experts=num_local, **options)

    def experts(rows: Tensor, index: Tensor, weights: Tensor, max_rows: int | None = None) -> Tensor:
        # Optional: an implementation that a user registered need not take it.
        bound = {} if max_rows is None else {"max_rows": max_rows}
        return compute(rows, index, weights, gate_up_e, down_e, **biases, **bound)

    arguments = state, hidden_states, top_k_index, top_k_weights, experts
    if state.peers is None:
        return exchange_by_all_to_all(*arguments, num_experts=num_experts)
    from patchgen.runtime.parallel.expert_peers import exchange_by_peer_memory  # loads Triton

    pushes = seams.selected()[SEAM] in _PUSHING
    return exchange_by_peer_memory(*arguments, num_experts=num_experts, pushes=pushes)


def _local_factors(adapter: LowRank | None, num_local: int) -> LowRank | None:
    return adapter and LowRank(
        _local_experts(adapter.left, num_local), _local_experts(adapter.right, num_local), adapter.scale
    )


def _local_experts(tensor: Tensor, num_local: int) -> Tensor:
    local = _ToLocal.apply(tensor) if isinstance(tensor, DTensor) else tensor
    if local is not tensor and (sink := getattr(tensor, early_gradients.DEFERRED_GRADIENT_SINK, None)) is not None:
        setattr(local, early_gradients.DEFERRED_GRADIENT_SINK, sink)
    if local.shape[0] != num_local:
        raise ValueError(
            f"This rank owns {num_local} experts but their parameters have {local.shape[0]}: they were not sharded over the EP "
            "ranks. To fix: call runtime.parallel.sharding.shard_model before the first step."
        )
    return local


class _ToLocal(torch.autograd.Function):
    """`to_local` whose backward keeps a missing gradient None, for deferred gradients (`early_gradients`)."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.set_materialize_grads(False)
        ctx.layout = tensor.device_mesh, tensor.placements
        return tensor.to_local().view_as(tensor.to_local())

    @staticmethod
    def backward(ctx, gradient):
        return None if gradient is None else DTensor.from_local(gradient, *ctx.layout, run_check=False)
