"""The load-balancing loss of routers: one number in every layout and for every padding.

    L = E / N  *  sum over real tokens t and experts e of  f[g(t), e] * p[t, e]

    N   real tokens of the step: all ranks, all micro-batches, no padding
    p   router probabilities of a token, averaged over layers
    f   the fraction of the real tokens of a group routed to the expert, averaged over layers; it has no gradient
    g   the group of a token: its row, over all ranks that have a slice of it ("row"), or the whole step ("global")

So L is upstream's formula on each group without its padding, averaged over groups weighted by their real tokens. Only f
needs other ranks, E numbers for each group: p of a token contributes to this rank's share only.

Upstream's function is called for each group. Before it multiplies its two means it passes them to `means`, which turns
the first into the mean over the full group and the second into this rank's part of the mean over the step.

    B rows   s tokens of this rank's slice   E experts
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchgen.runtime import model_calls, parallel
from patchgen.runtime.parallel import loss
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.state import ParallelState


@dataclass(frozen=True)
class TokenGroup:
    """The group whose loss is being computed, for `means`.

    Attributes:
        num_local: `()` float32, its real tokens on this rank.
        num_in_step: `()` or a number, the real tokens of the step.
    """

    num_local: Tensor
    num_in_step: Tensor | int
    state: ParallelState


@contextlib.contextmanager
def _within(group: TokenGroup) -> Iterator[None]:
    context = group.state.context
    before, context.router_group = context.router_group, group
    try:
        yield
    finally:
        context.router_group = before


def router_loss(
    function: Callable[..., Any],
    *args: Any,
    tokens: Tensor,
    real_tokens: Tensor | None,
    state: ParallelState,
    **kwargs: Any,
) -> Any:
    """`ops.router_loss` while `state` is active: this rank's share of the loss of the step."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    gate_logits = bound.arguments["gate_logits"]
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return function(*args, **kwargs)  # upstream defines the loss without routers
    step = loss.current_step()
    if not step.router_loss:
        return gate_logits[0].new_zeros(())
    B, s = tokens.shape[:2]
    _require_rows(gate_logits, B, s)
    real_tokens = model_calls.extra_inputs().get("real_tokens") if real_tokens is None else real_tokens
    if apart := model_calls.documents_apart():  # a group is a packed row, however its documents are computed
        gate_logits = tuple(apart.packed(logits.unflatten(0, (B, s))).flatten(0, 1) for logits in gate_logits)
        real_tokens = None if real_tokens is None else apart.packed(real_tokens)
        B, s = apart.shape
    real_Bs = _real_tokens(real_tokens, bound.arguments.get("attention_mask"), B, s, state)
    num_local_B = gate_logits[0].new_full((B,), s, dtype=torch.float32) if real_Bs is None else real_Bs.sum(1).float()
    num_in_step = _tokens_of_step(step, num_local_B, state)

    def loss_of(rows: slice) -> Any:
        mask = None
        if real_Bs is not None:
            # A mean over no token would be 0 / 0, also in the backward: it is taken over all tokens, with weight zero.
            mask = torch.where(num_local_B[rows].sum() > 0, real_Bs[rows], True).long()
        of_rows = tuple(logits.unflatten(0, (B, s))[rows].flatten(0, 1) for logits in gate_logits)
        bound.arguments.update(gate_logits=of_rows, attention_mask=mask)
        with _within(TokenGroup(num_local_B[rows].sum(), num_in_step, state)):
            return function(*bound.args, **bound.kwargs)

    if state.router_loss == "global":
        return loss_of(slice(0, B))
    return sum(loss_of(slice(row, row + 1)) for row in range(B))


def means(tokens_per_expert: Tensor, router_prob_per_expert: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.router_means` while a parallel state is active; see the module docstring."""
    group = parallel.context().router_group
    if group is None:
        raise RuntimeError(
            "A load-balancing loss was called directly while a parallel state is active, so it is unknown which of its tokens "
            "are padding. To fix: call it as generated models do, ops.router_loss(function, ..., tokens=, real_tokens=)."
        )
    if tokens_per_expert.requires_grad:
        raise ValueError(
            "The first factor of a load-balancing loss requires a gradient: expected the fractions of tokens per expert, which "
            "do not, then the router probabilities. To fix: swap them in the call of ops.router_means."
        )
    if group.state.router_loss == "global":
        tokens_per_expert = _group_mean(tokens_per_expert, group.num_local, None)
    elif group.state.sp > 1:
        tokens_per_expert = _group_mean(tokens_per_expert, group.num_local, group.state.sp_group)
    return tokens_per_expert, router_prob_per_expert * (group.num_local / group.num_in_step)


def _group_mean(local_mean: Tensor, num_local: Tensor, process_group: Any) -> Tensor:
    """The mean over the tokens of all ranks of a process group (None: all ranks), from the mean over local tokens."""
    weighted = torch.cat([(local_mean.float() * num_local).flatten(), num_local[None]])
    total = all_reduce(weighted, group=process_group, operation="sum the loads of the experts")
    return (total[:-1] / total[-1].clamp(min=1)).view_as(local_mean).to(local_mean.dtype)


def _tokens_of_step(step: loss.Step, num_local_B: Tensor, state: ParallelState) -> Tensor | int:
    if step.num_micro_batches > 1:
        if step.num_tokens is None:
            raise ValueError(
                f"The router loss is a mean over the tokens of a step, whose number is unknown in this step of "
                f"{step.num_micro_batches} micro-batches. To fix: loss.step(items, micro_batches, "
                "num_tokens=loss.count_tokens(micro_batches, device))."
            )
        if state.router_loss == "global":
            raise ValueError(
                f"The router loss over the whole step cannot be accumulated over {step.num_micro_batches} "
                "micro-batches: the loads of later ones are unknown in the backward of the first. To fix: use one "
                "micro-batch per step and rank, or router_loss 'row'."
            )
    if step.num_tokens is not None:
        return step.num_tokens
    return all_reduce(num_local_B.sum(), operation="count the tokens of a batch").clamp(min=1)


def _require_rows(gate_logits: tuple[Tensor, ...], B: int, s: int) -> None:
    mismatch = next((logits for logits in gate_logits if logits.ndim != 2 or logits.shape[0] != B * s), None)
    if mismatch is not None:
        raise ValueError(
            f"Router logits of shape {tuple(mismatch.shape)} do not match {B} rows of {s} tokens: expected "
            f"({B * s}, experts) in every layer."
        )


def _real_tokens(
    real_tokens: Tensor | None, attention_mask: Any, B: int, s: int, state: ParallelState
) -> Tensor | None:
    """`(B, s)` bool: this rank's tokens that are not padding; None if all are real."""
    mask = attention_mask if real_tokens is None else real_tokens
    if mask is None:
        return None
    name = "attention_mask" if real_tokens is None else "real_tokens"
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    if shape == (B, s):
        return mask.bool()
    if name == "attention_mask" and shape == (B, s * state.sp):
        return mask[:, state.sp_rank * s : (state.sp_rank + 1) * s].bool()
    raise ValueError(
        f"{name} {shape} does not mark the padding of {B} rows of {s} tokens: expected ({B}, {s}). To fix: use "
        "batch.slice_batch, which computes real_tokens from the attention mask and from its own padding."
    )
