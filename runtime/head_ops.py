"""The functions of `ops.py` for the end of a model: the head with its loss, and the router loss.

B batch   S sequence of this rank   T tokens (B * S)   H hidden size   E experts   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from transformers.loss.loss_utils import ForMaskedLMLoss

from patchgen.runtime import parallel, seams
from patchgen.runtime.written_losses import aligned_cross_entropy, kept_labels, shifted_cross_entropy

if TYPE_CHECKING:
    from torch import Tensor

    from patchgen.runtime.parallel.state import ParallelState


def causal_lm_loss(
    head: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor | None, *,
    loss_function: Callable[..., Tensor], vocab_size: int | None,
    training: bool = True, upcast: bool = False,
    **kwargs: Any,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The language-model head and its loss.

    Args:
        head: maps `hidden_states` `[B, S, H]` to logits `[B, S, V]`: the output projection, or a function with everything
            else that the model does to the logits (softcap, scaling, ...).
        labels: `[B, S]`, or of the full sequence in a slice; not yet shifted, unless the loss never shifts them; `-100` is
            ignored. None: no loss is computed.
        loss_function: upstream's, called as `loss_function(logits, labels, vocab_size, **kwargs)`; `aligned_cross_entropy`
            or `shifted_cross_entropy` if the head computes the loss inline.
        vocab_size: V; None for the last dimension of the logits.
        training: whether the model trains. In evaluation the caller needs the logits.
        upcast: with labels, upstream's logits are in fp32.
        kwargs: what upstream passes to its loss (`num_items_in_batch`, `shift_labels`, ...).

    Returns:
        `(logits, loss)`. Without labels the loss is None. A fused implementation returns None for the logits; it serves in
        training, and if only the loss is read (`parallel.loss.step`, also in the trainer's evaluation). On several ranks
        the loss is this rank's share of the mean over the global batch, or of the step's objective.

    Raises:
        ValueError: with a parallel state: a loss that is neither transformers' ForCausalLMLoss nor an inline one.
    """
    if labels is None:
        return head(hidden_states), None
    casts_within = loss_function is ForMaskedLMLoss  # transformers' own, whose labels are not shifted
    if casts_within:
        loss_function = aligned_cross_entropy
    state, read_losses, needs_logits = parallel.current(), None, not training
    kwargs = {**_labels_of_call(), **kwargs}
    is_served = seams.selected()["causal_lm_loss"] != seams.EAGER
    if is_served or state is not None or loss_function is aligned_cross_entropy:
        labels = _inline_loss_labels(loss_function, labels, kwargs)
    if state is not None:
        from patchgen.runtime.parallel.loss import current_step, in_step

        if (step := current_step()).objective is not None:
            return None, step.objective(head, hidden_states)
        labels, kwargs = _labels_of_step(labels, hidden_states, loss_function, kwargs, state)
        read_losses, needs_logits = step.read_losses, needs_logits and not in_step()
    if is_served and not needs_logits:
        options = {"loss_function": loss_function, "vocab_size": vocab_size, **kwargs}
        if read_losses is not None:
            options["read_losses"] = read_losses
        return seams.implementation("causal_lm_loss")(head, hidden_states, labels, **options)
    logits = head(hidden_states).float() if upcast else head(hidden_states)
    loss_logits = logits.float() if casts_within else logits  # the caller's keep their dtype
    if read_losses is not None:
        from patchgen.kernels.loss.causal_lm_loss import losses_of_rows

        read_losses(losses_of_rows(loss_logits, kwargs["shift_labels"]))
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    return logits, loss_function(logits=loss_logits, labels=labels, vocab_size=vocab_size, **kwargs)


def _inline_loss_labels(loss_function: Callable[..., Tensor], labels: Tensor, kwargs: dict) -> Tensor:
    """The labels of a head's inline loss, without those that its mask drops. Labels that are never shifted are also put into
    `kwargs` as `shift_labels`. Takes the mask out of `kwargs`; the labels of any other loss are returned as they are."""
    mask = kwargs.pop("attention_mask", None) if loss_function is shifted_cross_entropy else None
    if kwargs.get("shift_labels") is None:
        if loss_function is shifted_cross_entropy:
            return kept_labels(labels, mask)
        if loss_function is aligned_cross_entropy:
            kwargs["shift_labels"] = labels
    return labels


def _labels_of_step(
    labels: Tensor, hidden_states: Tensor, loss_function: Callable[..., Tensor], kwargs: dict, state: ParallelState
) -> tuple[Tensor, dict]:
    """The labels of this rank's slice, and the loss arguments about the full step."""
    from patchgen.kernels.loss.causal_lm_loss import require_causal_lm_loss
    from patchgen.runtime.parallel.loss import current_step, global_labels

    step = current_step()
    if kwargs.get("shift_labels") is labels and step.num_items is not None and not step.counts_targets:
        raise ValueError(
            "The labels of this model are not shifted (masked tokens, or the targets of its decoder), but this step counted "
            "labels of the next token, so its loss cannot be a share of the step. Compute it outside of `parallel.loss.step`."
        )
    require_causal_lm_loss(
        loss_function, "a loss of several ranks or micro-batches", "compute it without a parallel state"
    )
    return global_labels(labels, hidden_states, kwargs, state)


def require_no_step(labels: object, what: str) -> None:
    """Raises ValueError if there are labels and a parallel state, in a step or not, but the head's loss is upstream's own mean:
    `what`, as source."""
    if labels is not None and parallel.current() is not None:
        from patchgen.runtime.parallel.loss import upstream_mean_message

        raise ValueError(upstream_mean_message("This model", what))


def given_logits(logits: Tensor) -> Tensor:
    """The head of a model whose logits come from another model: the identity on `[B, S, V]`."""
    return logits


def step_labels(given: Mapping[str, object]) -> dict[str, object]:
    """The arguments about a step's labels, for the loss of a head to which upstream does not pass them.

    Args:
        given: the keyword arguments of the head's forward.

    Returns:
        Its `shift_labels` and `num_items_in_batch` with a parallel state; else nothing, for upstream's loss.
    """
    if parallel.current() is None:
        return {}
    from patchgen.runtime import model_calls  # imports kernels

    return {name: given[name] for name in model_calls.STEP_INPUTS if name in given}


def _labels_of_call() -> dict[str, object]:
    """`step_labels` of the arguments that the model was called with but its forward does not take."""
    if parallel.current() is None:
        return {}
    from patchgen.runtime import model_calls

    return step_labels(model_calls.extra_inputs())


def router_loss(
    function: Callable[..., object], *args: object, tokens: Tensor, real_tokens: Tensor | None = None, **kwargs: object
) -> object:
    """The load-balancing loss of a model's routers.

    Without a parallel state: upstream's function, called as upstream calls it. With one, even on one rank: this rank's share
    of a value that is the same in every layout and for every padding (`runtime/parallel/router_loss.py` has the formula):
    upstream's loss of each row without padding, averaged over the rows of the step, weighted by tokens; with the state's
    `router_loss` "global", that of all tokens of the step.

    Args:
        function: upstream's; its parameter `gate_logits` takes the router logits of each layer, `[T, E]`, and its
            parameter `attention_mask` None or `[B, S]`.
        tokens: token ids or embeddings, `[B, S, ...]`, for the number of rows.
        real_tokens: bool `[B, S]`, False for padding; None: from `attention_mask`.

    Raises:
        ValueError: shapes of logits or masks do not match the tokens; accumulation without the step's number of tokens.
    """
    state = parallel.current()
    if state is None:
        return function(*args, **kwargs)
    from patchgen.runtime.parallel.router_loss import router_loss as over_ranks

    return over_ranks(function, *args, tokens=tokens, real_tokens=real_tokens, state=state, **kwargs)


def router_means(tokens_per_expert: Tensor, router_prob_per_expert: Tensor) -> tuple[Tensor, Tensor]:
    """The two factors of the load-balancing loss, before their product in the function that `router_loss` calls.

    Unchanged without a parallel state. With one: the first averaged over the ranks that have tokens of its group (a row, or the
    step), since the product of means is not the mean of products; the second this rank's part of a mean over the step.

    Args:
        tokens_per_expert: the share of tokens routed to each expert, a mean over this rank's tokens, `[..., E]`.
        router_prob_per_expert: the mean router probability of each expert over this rank's tokens, `[..., E]`.
    """
    if parallel.current() is None:
        return tokens_per_expert, router_prob_per_expert
    from patchgen.runtime.parallel.router_loss import means

    return means(tokens_per_expert, router_prob_per_expert)
