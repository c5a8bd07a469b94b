"""The load-balancing loss of routers: one number in every layout and for every padding.

    L = E / N  *  sum over real tokens t and experts e of  f[g(t), e] * p[t, e]

    N   real tokens of the step: all ranks, all micro-batches, no padding
    p   router probabilities of a token, the mean over layers
    f   the share of the real tokens of a group that chose the expert, the mean over layers; it has no gradient
    g   the group of a token: its row, over all ranks that hold a slice of it ("row"), or the whole step ("global")

So L is upstream's formula on each group without its padding, averaged over groups by their real tokens. Only f has to
be known beyond this rank, E numbers for each group: p of a token adds to this rank's share and to nobody else's.

Upstream's function is called for one group after the other. Before it multiplies its two means it hands them to
`means`, which makes the first that of the whole group and the second this rank's part of a mean over the step.

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
class Group:
    """What `means` must know of the group whose loss is computed.

    Attributes:
        own: `()` float32, its real tokens on this rank.
        total: `()` or a number, the real tokens of the step.
    """

    own: Tensor
    total: Tensor | int
    state: ParallelState


@contextlib.contextmanager
def _computing(group: Group) -> Iterator[None]:
    now = group.state.context
    before, now.router_group = now.router_group, group
    try:
        yield
    finally:
        now.router_group = before


def router_loss(
    function: Callable[..., Any],
    *args: Any,
    tokens: Tensor,
    real_tokens: Tensor | None,
    state: ParallelState,
    **kwargs: Any,
) -> Any:
    """`ops.router_loss` while `state` is live: this rank's share of the loss of the step."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    gate_logits = bound.arguments["gate_logits"]
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return function(*args, **kwargs)  # upstream says what the loss of no router is
    step = loss.current_step()
    if not step.router_loss:
        return gate_logits[0].new_zeros(())
    B, s = tokens.shape[:2]
    _require_rows(gate_logits, B, s)
    real_tokens = model_calls.kept().get("real_tokens") if real_tokens is None else real_tokens
    if apart := model_calls.documents_apart():  # a group is a packed row, however its documents are computed
        gate_logits = tuple(apart.packed(logits.unflatten(0, (B, s))).flatten(0, 1) for logits in gate_logits)
        real_tokens = None if real_tokens is None else apart.packed(real_tokens)
        B, s = apart.shape
    real_Bs = _real_tokens(real_tokens, bound.arguments.get("attention_mask"), B, s, state)
    own = gate_logits[0].new_full((B,), s, dtype=torch.float32) if real_Bs is None else real_Bs.sum(1).float()
    total = _tokens_of_step(step, own, state)

    def loss_of(rows: slice) -> Any:
        mask = None
        if real_Bs is not None:
            # A mean over no token would be 0 / 0, in the backward as well: it is taken over all, and counts nothing.
            mask = torch.where(own[rows].sum() > 0, real_Bs[rows], True).long()
        of_rows = tuple(logits.unflatten(0, (B, s))[rows].flatten(0, 1) for logits in gate_logits)
        bound.arguments.update(gate_logits=of_rows, attention_mask=mask)
        with _computing(Group(own[rows].sum(), total, state)):
            return function(*bound.args, **bound.kwargs)

    if state.router_loss == "global":
        return loss_of(slice(0, B))
    return sum(loss_of(slice(row, row + 1)) for row in range(B))


def means(tokens_per_expert: Tensor, router_prob_per_expert: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.router_means` while a parallel state is live; see the head of this file."""
    group = parallel.context().router_group
    if group is None:
        raise RuntimeError(
            "A load-balancing loss was called directly while a parallel state is live: nothing says which of its tokens "
            "are padding. Call it as generated models do: ops.router_loss(function, ..., tokens=, real_tokens=)."
        )
    if tokens_per_expert.requires_grad:
        raise ValueError(
            "The first factor of a load-balancing loss has a gradient: expected the shares of tokens per expert, which "
            "have none, then the router probabilities. Swap them in the call of ops.router_means."
        )
    if group.state.router_loss == "global":
        tokens_per_expert = _group_mean(tokens_per_expert, group.own, None)
    elif group.state.sp > 1:
        tokens_per_expert = _group_mean(tokens_per_expert, group.own, group.state.sp_group)
    return tokens_per_expert, router_prob_per_expert * (group.own / group.total)


def _group_mean(share: Tensor, own: Tensor, process_group: Any) -> Tensor:
    """The mean over the tokens of all ranks of a process group, all ranks if None, from that over `own` tokens."""
    weighed = torch.cat([(share.float() * own).flatten(), own[None]])
    total = all_reduce(weighed, group=process_group, operation="add up the loads of the experts")
    return (total[:-1] / total[-1].clamp(min=1)).view_as(share).to(share.dtype)


def _tokens_of_step(step: loss.Step, own: Tensor, state: ParallelState) -> Tensor | int:
    if step.num_micro_batches > 1:
        if step.num_tokens is None:
            raise ValueError(
                f"The router loss is a mean over the tokens of a step, and this step of {step.num_micro_batches} "
                "micro-batches does not say how many there are: loss.step(items, micro_batches, "
                "num_tokens=loss.count_tokens(micro_batches, device))."
            )
        if state.router_loss == "global":
            raise ValueError(
                f"The router loss over the whole step cannot be accumulated over {step.num_micro_batches} "
                "micro-batches: the loads of later ones are not known at the backward of the first. Take one "
                "micro-batch per step and rank, or router_loss 'row'."
            )
    if step.num_tokens is not None:
        return step.num_tokens
    return all_reduce(own.sum(), operation="count the tokens of a batch").clamp(min=1)


def _require_rows(gate_logits: tuple[Tensor, ...], B: int, s: int) -> None:
    wrong = next((logits for logits in gate_logits if logits.ndim != 2 or logits.shape[0] != B * s), None)
    if wrong is not None:
        raise ValueError(
            f"Router logits of shape {tuple(wrong.shape)} do not belong to {B} rows of {s} tokens: expected "
            f"({B * s}, experts) in every layer."
        )


def _real_tokens(
    real_tokens: Tensor | None, attention_mask: Any, B: int, s: int, state: ParallelState
) -> Tensor | None:
    """`(B, s)` bool: this rank's tokens that are not padding; None if all are real."""
    given = attention_mask if real_tokens is None else real_tokens
    if given is None:
        return None
    name = "attention_mask" if real_tokens is None else "real_tokens"
    shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
    if shape == (B, s):
        return given.bool()
    if name == "attention_mask" and shape == (B, s * state.sp):
        return given[:, state.sp_rank * s : (state.sp_rank + 1) * s].bool()
    raise ValueError(
        f"{name} {shape} does not say which of {B} rows of {s} tokens are padding: expected ({B}, {s}). "
        "batch.slice_batch makes real_tokens from the attention mask and from what it pads."
    )
