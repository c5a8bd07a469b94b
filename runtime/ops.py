"""The functions that generated code calls. Generated files import this module and no other code of ours.

Shapes in this file:

    B batch   S sequence of this rank   T tokens (B * S)   H hidden size   D head size   N heads
    E experts   I expert intermediate size   K experts per token   V vocabulary   C channels

Every function is exact for one process: where a parallel meaning exists, it is the identity until a mesh does.
The kernels behind the seams are chosen in `runtime/seams.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from transformers.loss.loss_utils import ForMaskedLMLoss

from patchgen.runtime import expert_adapters, parallel, seams
from patchgen.runtime.checkpoint_mapping import (
    initialize_as_upstream,
    register_checkpoint_mapping,
    register_stacked_experts,
)
from patchgen.runtime.compatibility import require_transformers
from patchgen.runtime.experts_interface import divided_over_ranks, experts_interface, experts_kernel, needs_seam
from patchgen.runtime.multimodal_ops import (
    absent_tower,
    attends_by_lengths,
    chunk_rows,
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
from patchgen.runtime.written_losses import aligned_cross_entropy, kept_labels, shifted_cross_entropy

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
    "mark_replicated",
    "max_seqlen",
    "mrope_position_ids",
    "parallel_plan",
    "refuse_slices",
    "refuse_uneven_ranks",
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
    """The experts of one MoE layer: `sum_k weight[t, k] * down[e](gate(gate_up[e](x[t])))` with `e = index[t, k]`.

    Args:
        hidden_states: `[T, H]`.
        top_k_index: `[T, K]`, integers in `[0, num_experts)`; the value `num_experts` marks a slot to be left out. None, and the
            weights too: the tokens are `E` equal parts, one for each expert.
        top_k_weights: `[T, K]`, the routing weights.
        gate_up_proj: `[E, 2I, H]`; `[E, I, H]` without a gate; the last two dimensions swapped if `is_transposed`.
        down_proj: `[E, H, I]`; swapped if `is_transposed`.
        activation: the elementwise function of `activation(gate) * up` (an `nn.Module` or a function).
        apply_gate: replaces `activation(gate) * up`: maps `[rows, 2I]` to `[rows, I]`.
        gate_up_bias, down_bias: `[E, 2I]` and `[E, H]`.
        is_gated: whether there is a gate; if not, `activation` is applied to the whole projection.
        is_interleaved: gate and up alternate (`gate0, up0, gate1, ...`) where they are otherwise one after the other.
        post_expert_norm: applied to each expert's output before the routing weight.

    Returns:
        `[T, H]` in the dtype of `hidden_states`.
    """
    if top_k_index is None:
        top_k_index, top_k_weights = _equal_shares(hidden_states, num_experts, activation)
    if divided_over_ranks():
        from patchgen.runtime.parallel.experts import fused_moe as over_ranks

        implementation = functools.partial(over_ranks, parallel.current())
    else:
        implementation = experts_kernel()
    adapters = expert_adapters.taken_by(gate_up_proj, down_proj)
    # Only then: an implementation that a user registered need not know them.
    more = {} if adapters is None else {"adapters": adapters}
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
        **more,
    )


def _equal_shares(
    hidden_states: Tensor, num_experts: int, activation: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Index and weights `[T, 1]` of rows of which each expert is handed as many, one expert after the other.

    Rows of zeros, which are tokens times the weight of an expert that they did not choose, cost no product: where the
    activation is zero at zero their result is zero, and so are all gradients through it.
    """
    from patchgen.kernels.activations import recognise  # here, for it loads transformers

    rows = hidden_states.shape[0]
    index = torch.arange(rows, device=hidden_states.device) // max(rows // num_experts, 1)
    if recognise(activation, None, True, False) is not None:
        index = torch.where((hidden_states != 0).any(dim=-1), index, num_experts)
    return index[:, None], hidden_states.new_ones(rows, 1)


def beside_experts(
    shared_experts: Callable[..., Tensor], *args: Tensor, at_once: bool = False
) -> Callable[[], Tensor]:
    """The shared experts of an MoE block, computed while tokens travel between ranks; without EP where upstream does.

    Args:
        shared_experts: the module; `args` are what upstream calls it with.
        at_once: upstream calls it here, not where the result is taken.

    Returns:
        A function to be called once, for the result.
    """
    if divided_over_ranks():
        from patchgen.runtime.parallel import overlap

        return overlap.announce(shared_experts, *args)
    if at_once:
        result = shared_experts(*args)
        return lambda: result
    return lambda: shared_experts(*args)


def causal_lm_loss(
    head: Callable[[Tensor], Tensor],
    hidden_states: Tensor,
    labels: Tensor | None,
    *,
    loss_function: Callable[..., Tensor],
    vocab_size: int | None,
    training: bool = True,
    local_terms: tuple[str, ...] = (),
    upcast: bool = False,
    **kwargs: object,
) -> tuple[Tensor | None, Tensor | None]:
    """The language-model head and its loss.

    Args:
        head: maps hidden states `[B, S, H]` to logits `[B, S, V]`: the output projection itself where the model does
            nothing else to the logits, else a function with everything it does (softcap, scaling, ...).
        hidden_states: `[B, S, H]`.
        labels: `[B, S]`, not yet shifted; `-100` is ignored. None: no loss is computed.
        loss_function: upstream's loss for this class, called as `loss_function(logits, labels, vocab_size, **kwargs)`;
            `aligned_cross_entropy` or `shifted_cross_entropy` where the head writes its own out.
        vocab_size: V; None for the last dimension of the logits.
        training: whether the model is in training mode. In evaluation the logits are what the caller came for.
        local_terms: what the model adds to the loss that is a number of one rank's tokens, as source.
        upcast: where there are labels, upstream's logits are in fp32.
        kwargs: what upstream hands to its loss (`num_items_in_batch`, `shift_labels`, ...).

    Returns:
        `(logits, loss)`. Without labels the loss is None. A fused implementation returns None for the logits that it
        never materialised; it serves in training, and where the loss is all that is read (`parallel.loss.step`, in
        which the trainer evaluates too). Elsewhere both are returned, as upstream does. On many ranks the loss is this
        rank's share: the shares of all ranks and micro-batches add up to the mean over the global batch. A step with an
        objective of its own has that one's share instead.

    Raises:
        ValueError: another loss than transformers' ForCausalLMLoss while a parallel state is live; `local_terms` in a
            step of several ranks or micro-batches, whose sum they are not.
    """
    if labels is None:
        return head(hidden_states), None
    if loss_function is ForMaskedLMLoss:  # transformers' own, whose labels are not shifted
        loss_function, upcast = aligned_cross_entropy, True
    state, read_losses = parallel.current(), None
    needs_logits = not training
    is_served = serves("causal_lm_loss")
    if loss_function is shifted_cross_entropy and (is_served or state is not None):
        mask = kwargs.pop("attention_mask", None)
        labels = kept_labels(labels, mask) if kwargs.get("shift_labels") is None else labels
    if loss_function is aligned_cross_entropy and kwargs.get("shift_labels") is None:
        kwargs["shift_labels"] = labels
    if state is not None:
        from patchgen.kernels.causal_lm_loss import require_causal_lm_loss
        from patchgen.runtime.parallel.loss import current_step, global_labels, in_step, require_shares

        require_shares(local_terms, state)
        if (objective := current_step().objective) is not None:
            return None, objective(head, hidden_states)
        step = current_step()
        if kwargs.get("shift_labels") is labels and step.num_items is not None and not step.counts_targets:
            raise ValueError(
                "The labels of this model are the targets of its decoder, and a step counts labels of the next token: "
                "its loss has no share of a step. Compute it outside of `parallel.loss.step`."
            )
        require_causal_lm_loss(loss_function, "parallel")
        labels, kwargs = global_labels(labels, hidden_states, kwargs, state)
        read_losses = current_step().read_losses
        needs_logits = needs_logits and not in_step()
    if is_served and not needs_logits:
        return seams.implementation("causal_lm_loss")(
            head,
            hidden_states,
            labels,
            loss_function=loss_function,
            vocab_size=vocab_size,
            **({"read_losses": read_losses} if read_losses is not None else {}),
            **kwargs,
        )
    logits = head(hidden_states).float() if upcast else head(hidden_states)
    if read_losses is not None:
        from patchgen.kernels.causal_lm_loss import losses_of_rows

        read_losses(losses_of_rows(logits, kwargs["shift_labels"]))
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    return logits, loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)


def require_no_step(labels: object, what: str) -> None:
    """Raises ValueError where labels would give a share of a step, and the head's loss is upstream's own: `what`, as source."""
    if labels is not None and parallel.current() is not None:
        from patchgen.runtime.parallel.loss import own_mean

        raise ValueError(own_mean("This model", what))


def drawn_mask(mask: object) -> object:
    """A mask as attention takes it that lays keys of its own beside it: the tensor of one of ours, else as it is."""
    from patchgen.runtime.attention_masks import MaskStructure

    return mask.tensor() if isinstance(mask, MaskStructure) else mask


def given_logits(logits: Tensor) -> Tensor:
    """The head of a model whose logits another model made: `[B, S, V]` as they are."""
    return logits


def step_labels(given: Mapping[str, object]) -> dict[str, object]:
    """What a caller says of the labels of a step, for the loss of a head to which upstream hands none of it.

    Args:
        given: the further arguments of the head's forward.

    Returns:
        `shift_labels` and `num_items_in_batch` of them while a parallel state is live. Without one nothing: alone the
        loss is upstream's.
    """
    names = ("shift_labels", "num_items_in_batch") if parallel.current() is not None else ()
    return {name: given[name] for name in names if name in given}


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


# ---------------------------------------------------------------------------------- sequence parallelism


def sequence_position_ids(position_ids: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """The position ids of this rank's slice of the sequence.

    Args:
        position_ids: `[..., S]` of this rank, `[..., S * sp]` of the whole sequence, or None for `0, 1, 2, ...`.
        hidden_states: `[B, S, H]`, this rank's slice.

    Returns:
        `[..., S]`; without sequence parallelism the argument itself, None included.
    """
    state = parallel.current()
    if state is None or state.sp == 1:
        return position_ids
    from patchgen.runtime.parallel.sequence import position_slice

    return position_slice(position_ids, hidden_states, state)


def causal_conv1d(
    convolution: Callable[..., Tensor], hidden_states: Tensor, weight: Tensor, *args, **kwargs
) -> Tensor:
    """A causal depthwise convolution over the whole sequence, of which each rank holds a slice.

    Documents of a packed row (`cu_seq_lens` among the keywords) are kept apart, on one rank too; upstream's torch form
    takes a row for one document.

    Args:
        convolution: upstream's function, called with the arguments that follow.
        hidden_states: `[B, C, S]`.
        weight: `[C, width]`.
    """
    from patchgen.runtime.parallel import mixers

    return mixers.causal_conv1d(convolution, hidden_states, weight, *args, state=parallel.current(), **kwargs)


def delta_rule(rule: Callable[..., object], query: Tensor, key: Tensor, value: Tensor, *args, **kwargs) -> object:
    """A linear-attention recurrence over the whole sequence, of which each rank holds a slice.

    Args:
        rule: upstream's function, called with the arguments that follow.
        query, key: `[B, S, N_k, D_k]`.
        value: `[B, S, N_v, D_v]`; further tensors (decay, beta) are `[B, S, N_v, ...]`.
    """
    from patchgen.runtime.parallel import mixers

    return mixers.delta_rule(rule, query, key, value, *args, state=parallel.current(), **kwargs)


def state_space_scan(scan: Callable[..., object], hidden_states: Tensor, *args, **kwargs) -> object:
    """A state-space recurrence by heads (Mamba-2) over the whole sequence, of which each rank holds a slice.

    Args:
        scan: upstream's function, called with the arguments that follow.
        hidden_states: `[B, S, N, D]`; `dt` is `[B, S, N]`, `A` `[N]`, `B` and `C` are `[B, S, groups, states]`.
    """
    from patchgen.runtime.parallel import mixers

    return mixers.state_space_scan(scan, hidden_states, *args, state=parallel.current(), **kwargs)


def selective_scan(scan: Callable[..., Tensor], hidden_states: Tensor, *args, **kwargs) -> Tensor:
    """A state-space recurrence by channels (Mamba) over the whole sequence, of which each rank holds a slice.

    Args:
        scan: upstream's function, called with the arguments that follow.
        hidden_states: `[B, C, S]`, as `dt`; `A` is `[C, states]`, `B` and `C` are `[B, states, S]`.
    """
    from patchgen.runtime.parallel import mixers

    return mixers.selective_scan(scan, hidden_states, *args, state=parallel.current(), **kwargs)


def fused_scan(kernel: Callable[..., object], *args, **kwargs) -> object:
    """A kernel for a whole state-space mixer, for which upstream has no torch form.

    Returns:
        What the kernel gives; None where the sequence is divided or packed, for which upstream takes single steps.
    """
    from patchgen.runtime.parallel import mixers

    return mixers.fused_scan(kernel, *args, state=parallel.current(), **kwargs)


def refuse_slices(mixer: str) -> None:
    """Raises `UnsupportedError` on a slice of the sequence: `mixer` mixes tokens in a form that nothing here divides."""
    state = parallel.current()
    if state is not None and state.sp > 1:
        from patchgen.runtime.attention_masks import UnsupportedError

        raise UnsupportedError(
            f"{mixer} mixes tokens along the sequence in a form that is not divided, and this rank holds a slice of the "
            f"sequence (sp={state.sp}). Train this model with sp=1."
        )


def tokens_of_any_rank(tokens: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """The tokens that a branch is for, `(B, S)`, if any of them is; on several ranks if any of any rank is, none of this rank's
    perhaps: then all ranks take it. Otherwise None. Waits for the device.

    Args:
        hidden_states: `(B, S, H)` of this rank.
    """
    found = tokens is not None and bool(tokens.any())
    state = parallel.current()
    if state is not None and state.config.world > 1:
        from patchgen.runtime.parallel.collectives import all_reduce

        own = hidden_states.new_tensor(found, dtype=torch.int32)
        found = bool(all_reduce(own, operation="agree on a branch of tokens"))
        if found and tokens is None:
            tokens = hidden_states.new_zeros(hidden_states.shape[:-1], dtype=torch.int32)
    return tokens if found else None


def refuse_uneven_ranks(name: str, test: str) -> None:
    """Raises `UnsupportedError` on several ranks: `name` runs a module only where `test`, of this rank's tokens, asks for it."""
    state = parallel.current()
    if state is not None and state.config.world > 1:
        from patchgen.runtime.attention_masks import UnsupportedError

        raise UnsupportedError(
            f"{name} runs some of its modules only where `{test}`, and ranks whose tokens say otherwise would leave the others "
            f"waiting (world={state.config.world}). Train this model on one rank."
        )


def mrope_position_ids(
    position_ids: Tensor | None, batch: Tensor, stacked_position_ids: Tensor | None = None
) -> Tensor | None:
    """Multimodal position ids in upstream's layout, which the name of the argument says, never a size.

    Args:
        position_ids: `(rows, B or 1, S)`, as upstream has it: 3 rows (time, height, width), 4 (text first) or 1; text
            position ids `(B, S)`, and None, are returned as they are.
        batch: token ids or embeddings of the same batch, `(B, ...)`.
        stacked_position_ids: `(B, rows, S)`, what a collator makes of the positions of single samples.

    Raises:
        ValueError: both, or a shape that the name does not say.
    """
    if stacked_position_ids is None and (position_ids is None or position_ids.ndim != 3):
        return position_ids
    from patchgen.runtime.parallel.batch import rows_first

    return rows_first(position_ids, stacked_position_ids, batch.shape[0])


# ------------------------------------------------------------------------------------------ router loss


def router_loss(
    function: Callable[..., object], *args: object, tokens: Tensor, real_tokens: Tensor | None = None, **kwargs: object
) -> object:
    """The load-balancing loss of a model's routers.

    Without a parallel state upstream's function, called as upstream calls it. While one is live, on one rank too: this
    rank's share of a number that is the same in every layout and for every padding (`runtime/parallel/router_loss.py`
    has the formula): upstream's on each row without its padding, the mean over the rows of the step by their tokens.

    Args:
        function: upstream's; its parameter `gate_logits` takes the router logits of each layer, `[T, E]`, and its
            parameter `attention_mask` None or `[B, S]`.
        tokens: token ids or embeddings, `[B, S, ...]`: how many rows there are.
        real_tokens: bool `[B, S]`, False where a token is padding; None: what `attention_mask` says.

    Raises:
        ValueError: logits or masks that do not fit the tokens; accumulation without the number of tokens of the step.
    """
    state = parallel.current()
    if state is None:
        return function(*args, **kwargs)
    from patchgen.runtime.parallel.router_loss import router_loss as over_ranks

    return over_ranks(function, *args, tokens=tokens, real_tokens=real_tokens, state=state, **kwargs)


def router_means(tokens_per_expert: Tensor, router_prob_per_expert: Tensor) -> tuple[Tensor, Tensor]:
    """The two factors of the load-balancing loss, above their product in the function that `router_loss` calls.

    Without a parallel state as they are. While one is live: the first over all ranks, for the product of two means is
    another number than the mean of products; the second this rank's part of a mean over the step.

    Args:
        tokens_per_expert: the share of tokens routed to each expert, a mean over this rank's tokens, `[..., E]`.
        router_prob_per_expert: the mean router probability of each expert over this rank's tokens, `[..., E]`.
    """
    if parallel.current() is None:
        return tokens_per_expert, router_prob_per_expert
    from patchgen.runtime.parallel.router_loss import means

    return means(tokens_per_expert, router_prob_per_expert)
