"""Expert parallelism: each rank has a part of the experts, and tokens reach the ranks that have theirs.

Two exchanges behind one function, `ParallelState.expert_exchange` says which:

    all_to_all     a row per slot, by NCCL or gloo (`expert_rows.py`): between hosts, and everywhere
    peer_memory    ranks of one host read each other's tokens, each once (`expert_peers.py`): no wait for the device
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
from patchgen.runtime.parallel.expert_peers import over_peers
from patchgen.runtime.parallel.expert_rows import dropped_rows, over_rows
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.uncompiled import uncompiled

__all__ = ["dropped_rows", "fused_moe"]
_OWN_TRITON = ("auto", "triton")  # implementations that hand on what the Triton experts return, as it is


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
    """`ops.fused_moe` over the experts of all ranks; index and `num_experts` are the model's, weights this rank's."""
    own = num_experts // state.ep
    gate_up_e, down_e = _own_experts(gate_up_proj, own), _own_experts(down_proj, own)
    given = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    biases = {name: None if bias is None else _own_experts(bias, own) for name, bias in given.items()}
    if adapters is not None:
        options["adapters"] = ExpertAdapters(*(_own_factors(one, own) for one in adapters))
    compute = partial(experts_kernel(), num_experts=own, **options)

    def experts(rows: Tensor, index: Tensor, weights: Tensor, max_rows: int | None = None) -> Tensor:
        # Only then: an implementation that a user registered need not know it.
        more = {} if max_rows is None else {"max_rows": max_rows}
        return compute(rows, index, weights, gate_up_e, down_e, **biases, **more)

    arguments = state, hidden_states, top_k_index, top_k_weights, experts
    if state.peers is None:
        return over_rows(*arguments, num_experts=num_experts)
    pushes = seams.selected()[SEAM] in _OWN_TRITON
    return over_peers(*arguments, num_experts=num_experts, pushes=pushes)


def _own_factors(added: LowRank | None, own: int) -> LowRank | None:
    return added and LowRank(_own_experts(added.left, own), _own_experts(added.right, own), added.scale)


def _own_experts(tensor: Tensor, own: int) -> Tensor:
    local = _Local.apply(tensor) if isinstance(tensor, DTensor) else tensor
    if local is not tensor and (take := getattr(tensor, early_gradients.TAKES_LATE, None)) is not None:
        setattr(local, early_gradients.TAKES_LATE, take)
    if local.shape[0] != own:
        raise ValueError(
            f"This rank owns {own} experts but their parameters have {local.shape[0]}: they were not divided over the "
            "EP ranks. Call runtime.parallel.sharding.shard_model before the first step."
        )
    return local


class _Local(torch.autograd.Function):
    """`to_local`, whose backward makes no gradient of zeros where there is none: one that was put off (`early_gradients`)."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.set_materialize_grads(False)
        ctx.layout = tensor.device_mesh, tensor.placements
        return tensor.to_local().view_as(tensor.to_local())

    @staticmethod
    def backward(ctx, gradient):
        return None if gradient is None else DTensor.from_local(gradient, *ctx.layout, run_check=False)
