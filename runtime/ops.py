"""The functions that generated code calls. Generated files import this module and no other code of ours.

Shapes in this file:

    B batch   S sequence of this rank   T tokens (B * S)   H hidden size   D head size   N heads
    E experts   I expert intermediate size   K experts per token

Heads and losses are in `head_ops.py`, mixers of tokens in `sequence_ops.py`, towers in `multimodal_ops.py`.

On one process, with eager seams, every function computes exactly what upstream does, except mixers over packed rows, which keep
documents apart; parallel functions are then the identity.
The kernels behind the seams are selected in `runtime/seams.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from patchgen.runtime import expert_adapters, seams
from patchgen.runtime.checkpoint_mapping import (
    initialize_as_upstream,
    register_checkpoint_mapping,
    register_stacked_experts,
)
from patchgen.runtime.compatibility import require_transformers
from patchgen.runtime.experts_interface import expert_parallel_state, experts_interface, experts_kernel, needs_seam
from patchgen.runtime.head_ops import (
    causal_lm_loss,
    given_logits,
    require_no_step,
    router_loss,
    router_means,
    step_labels,
)
from patchgen.runtime.multimodal_ops import (
    absent_tower,
    attends_by_lengths,
    chunk_rows,
    counted_from_the_start,
    encode_vision,
    is_sliced,
    local_features,
    local_levels,
    mark_replicated,
    max_seqlen,
    require_whole_sequence,
    tower_kwargs,
    tower_rows,
)
from patchgen.runtime.parallel_plan import ParallelPlan, parallel_plan
from patchgen.runtime.parts import build_part
from patchgen.runtime.positions import PositionIds
from patchgen.runtime.sequence_ops import (
    causal_conv1d,
    delta_rule,
    fused_scan,
    look_up_positions,
    mrope_position_ids,
    refuse_slices,
    selective_scan,
    sequence_position_ids,
    state_space_scan,
    tokens_of_any_rank,
)
from patchgen.runtime.written_losses import aligned_cross_entropy, shifted_cross_entropy

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ParallelPlan",
    "PositionIds",
    "absent_tower",
    "aligned_cross_entropy",
    "attends_by_lengths",
    "beside_experts",
    "build_part",
    "causal_conv1d",
    "causal_lm_loss",
    "chunk_rows",
    "counted_from_the_start",
    "delta_rule",
    "drawn_mask",
    "encode_vision",
    "experts_interface",
    "fused_moe",
    "fused_scan",
    "given_logits",
    "initialize_as_upstream",
    "is_sliced",
    "local_features",
    "local_levels",
    "look_up_positions",
    "mark_replicated",
    "max_seqlen",
    "mrope_position_ids",
    "parallel_plan",
    "refuse_slices",
    "register_checkpoint_mapping",
    "register_stacked_experts",
    "require_no_step",
    "require_transformers",
    "require_whole_sequence",
    "rms_norm",
    "rotary",
    "router_loss",
    "router_means",
    "selective_scan",
    "sequence_position_ids",
    "serves",
    "shifted_cross_entropy",
    "state_space_scan",
    "step_labels",
    "swiglu",
    "tokens_of_any_rank",
    "tower_kwargs",
    "tower_rows",
]


# ---------------------------------------------------------------------------------------------- seams


def serves(seam: str) -> bool:
    """Whether a kernel serves `seam` now; if not, the generated code runs the upstream code below the call."""
    if seam == "fused_moe" and needs_seam():
        return True
    return seams.selected()[seam] != seams.EAGER


def fused_moe(
    hidden_states: Tensor,
    top_k_index: Tensor | None,
    top_k_weights: Tensor | None,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    num_experts: int,
    activation: Callable[[Tensor], Tensor] | None = None,
    apply_gate: Callable[[Tensor], Tensor] | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    is_gated: bool = True,
    is_transposed: bool = False,
    is_interleaved: bool = False,
    post_expert_norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The experts of one MoE layer, `[T, H]`: `sum_k weight[t, k] * down[e](gate(gate_up[e](x[t])))`, `e = index[t, k]`.

    Args:
        top_k_index, top_k_weights: `[T, K]`, the experts, where `num_experts` marks a slot to skip, and their weights. None:
            the tokens are `E` equal parts, one for each expert.
        gate_up_proj: `[E, 2I, H]`; `[E, I, H]` without a gate; the last two dimensions swapped if `is_transposed`.
        down_proj: `[E, H, I]`; swapped if `is_transposed`.
        activation: the elementwise function of `activation(gate) * up` (an `nn.Module` or a function).
        apply_gate: replaces `activation(gate) * up`: maps `[rows, 2I]` to `[rows, I]`.
        gate_up_bias, down_bias: `[E, 2I]` and `[E, H]`.
        is_gated: whether there is a gate; if not, `activation` is applied to the full projection.
        is_interleaved: gate and up alternate (`gate0, up0, gate1, ...`) instead of being concatenated.
        post_expert_norm: applied to each expert's output before the routing weight.
    """
    if (top_k_index is None) is not (top_k_weights is None):
        raise ValueError("fused_moe takes top_k_index and top_k_weights, or neither: one of them is None.")
    if top_k_index is None or top_k_weights is None:
        top_k_index, top_k_weights = _equal_shares(hidden_states, num_experts, activation)
    implementation: Callable[..., Tensor]
    if (state := expert_parallel_state()) is not None:
        from patchgen.runtime.parallel.experts import fused_moe as over_ranks

        implementation = functools.partial(over_ranks, state)
    else:
        implementation = experts_kernel()
    adapters = expert_adapters.adapters_of(gate_up_proj, down_proj)
    return implementation(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up_proj,
        down_proj,
        num_experts=num_experts,
        activation=activation,
        apply_gate=apply_gate,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        is_gated=is_gated,
        is_transposed=is_transposed,
        is_interleaved=is_interleaved,
        post_expert_norm=post_expert_norm,
        **({} if adapters is None else {"adapters": adapters}),  # a user's implementation may not take them
    )


def _equal_shares(
    hidden_states: Tensor, num_experts: int, activation: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Index and weights `[T, 1]` of rows that are split equally over the experts, in order.

    Rows of zeros (tokens times the weight of an expert that they did not choose) are skipped if the activation is zero at
    zero: their result is then zero, and so are all gradients through it.
    """
    from patchgen.kernels.elementwise.activations import recognise  # imports transformers

    rows = hidden_states.shape[0]
    index = torch.arange(rows, device=hidden_states.device) // max(rows // num_experts, 1)
    if recognise(activation, None, True, False) is not None:
        index = torch.where((hidden_states != 0).any(dim=-1), index, num_experts)
    return index[:, None], hidden_states.new_ones(rows, 1)


def beside_experts(
    shared_experts: Callable[..., Tensor], *args: Tensor, at_once: bool = False
) -> Callable[[], Tensor]:
    """The shared experts of an MoE block, overlapped with the exchange of tokens; without EP computed where upstream does.

    Args:
        shared_experts: the module; `args` are upstream's arguments.
        at_once: upstream calls it here, not where the result is used.

    Returns:
        A function to call once, for the result.
    """
    if expert_parallel_state() is not None:
        from patchgen.runtime.parallel import overlap

        return overlap.announce(shared_experts, *args)
    if at_once:
        result = shared_experts(*args)
        return lambda: result
    return lambda: shared_experts(*args)


def drawn_mask(mask: object) -> object:
    """A mask for attention that extends it by other keys: one of ours as a tensor, others unchanged."""
    from patchgen.runtime.attention_masks import MaskStructure

    return mask.tensor() if isinstance(mask, MaskStructure) else mask


def rms_norm(
    hidden_states: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, in_fp32: bool = False
) -> Tensor:
    """Root-mean-square norm of the last dimension: `x / sqrt(mean(x^2) + eps) * (offset + weight)`.

    Args:
        hidden_states: `[..., H]`; the mean is taken in fp32.
        weight: `[H]`.
        offset: 1.0 for the models that store `weight - 1`.
        in_fp32: multiply by the weight before casting back to the input dtype, not after.
    """
    return seams.implementation("rms_norm")(hidden_states, weight, eps, offset=offset, in_fp32=in_fp32)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of the half-rotation form: `x * cos + rotate_half(x) * sin`.

    Args:
        query, key: `[B, N, S, D]` (`[B, S, N, D]` with `unsqueeze_dim=2`).
        cos, sin: `[B, S, D]`.
    """
    return seams.implementation("rotary")(query, key, cos, sin, unsqueeze_dim)


def swiglu(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """`activation(gate) * up`, elementwise; `gate` and `up` are `[..., I]`."""
    if not serves("swiglu"):
        return activation(gate) * up
    return seams.implementation("swiglu")(gate, up, activation)
