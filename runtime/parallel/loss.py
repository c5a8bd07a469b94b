"""Losses that are means over the global batch: all ranks, all micro-batches.

A rank's loss is its *share*: the shares of all ranks and micro-batches add up to the loss, and their gradients to its
gradient. FSDP2 is told to sum (`sharding.py`), so no factor of any mesh size appears anywhere.

    items = loss.count_items(micro_batches, state)          # labels that count, over the whole step
    for batch in micro_batches:
        with loss.step(items, len(micro_batches)):
            model(**batch).loss.backward()

    B rows   s tokens of this rank's slice   E experts
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.collectives import all_gather, all_reduce
from patchgen.runtime.parallel.sequence import slice_dimension
from patchgen.runtime.parallel.state import ParallelState


@dataclass(frozen=True)
class Step:
    """What one optimizer step covers: labels that count over all ranks and micro-batches, and micro-batches."""

    num_items: Tensor | int
    num_micro_batches: int


_STEP: Step | None = None


@contextlib.contextmanager
def step(num_items: Tensor | int, num_micro_batches: int = 1) -> Iterator[None]:
    """Within the block, losses are shares of a step of `num_items` labels and `num_micro_batches` micro-batches."""
    global _STEP
    before, _STEP = _STEP, Step(num_items, num_micro_batches)
    try:
        yield
    finally:
        _STEP = before


def in_step() -> bool:
    """Whether the loss that is computed now is a share of a step: nobody reads the logits."""
    return _STEP is not None


def count_items(micro_batches: Iterable[Mapping[str, Any]], device: torch.device | str) -> Tensor:
    """The labels that count in the micro-batches of all ranks: a tensor on `device`, at least 1; one collective.

    Args:
        micro_batches: with `shift_labels` of this rank's slice (`batch.slice_batch` makes them).
    """
    local = sum((batch["shift_labels"] != IGNORED).sum() for batch in micro_batches)
    total = torch.as_tensor(local, device=device, dtype=torch.long)
    if dist.is_initialized():
        total = all_reduce(total, operation="count the labels of the step")
    return total.clamp(min=1)


def global_labels(
    labels: Tensor, hidden_states: Tensor, arguments: dict[str, Any], state: ParallelState
) -> tuple[Tensor, dict[str, Any]]:
    """The labels and loss arguments of this rank, for `ops.causal_lm_loss`.

    Args:
        labels: `(B, s)` or `(B, s * sp)`, not yet shifted.
        hidden_states: `(B, s, H)`.
        arguments: of the loss: `shift_labels` and `num_items_in_batch` are used where given, and added where not.

    Returns:
        `labels` `(B, s)` and the arguments with `shift_labels` `(B, s)` and `num_items_in_batch`. Without a `step` or
        a number from the caller, the labels of this micro-batch on all ranks are counted.
    """
    s = hidden_states.shape[1]
    arguments = dict(arguments)
    shifted = arguments.get("shift_labels")
    if shifted is None:
        if state.sp > 1 and labels.shape[1] == s:
            firsts = all_gather(labels[:, :1], state.sp_group, dim=1, operation="hand on the first label of a slice")
            following = F.pad(firsts, (0, 1), value=IGNORED)[:, state.sp_rank + 1, None]
            shifted = torch.cat([labels[:, 1:], following], dim=1)
        else:
            shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    arguments["shift_labels"] = slice_dimension(shifted, s, state, dim=1).contiguous()
    if arguments.get("num_items_in_batch") is None:
        if _STEP is not None:
            arguments["num_items_in_batch"] = _STEP.num_items
        else:
            count = (arguments["shift_labels"] != IGNORED).sum()
            arguments["num_items_in_batch"] = all_reduce(count, operation="count the labels of a batch").clamp(min=1)
    return slice_dimension(labels, s, state, dim=1), arguments


# ------------------------------------------------------------------------------------------ router loss


class _GlobalMean(torch.autograd.Function):
    """This rank's share of a mean over all ranks, from the mean over its own tokens.

    Value: the global mean, divided by the number of shares. Gradient: what the global mean owes to this rank,
    `own tokens / all tokens`, for the gradients of all ranks are added up.
    """

    @staticmethod
    def forward(ctx, mean, part, shares):
        ctx.save_for_backward(part)
        ctx.steps = shares[1]
        total = all_reduce(mean * part, operation="average the router probabilities over all ranks")
        return total / (shares[0] * shares[1])

    @staticmethod
    def backward(ctx, gradient):
        (part,) = ctx.saved_tensors
        return gradient * part / ctx.steps, None, None


def router_means(
    tokens_per_expert: Tensor,
    router_prob_per_expert: Tensor,
    gate_logits: Sequence[Tensor],
    attention_mask: Tensor | None,
    state: ParallelState,
) -> tuple[Tensor, Tensor]:
    """`ops.router_means` on many ranks: both means are over the tokens of all ranks.

    The second is divided by the number of ranks and micro-batches, so that the loss is this rank's share, as the
    language-model loss is.
    """
    rows = gate_logits[0].shape[0]
    if attention_mask is None:
        own = tokens_per_expert.new_full((), float(rows))
    else:
        own = own_mask(attention_mask, rows, state).sum().to(tokens_per_expert.dtype)
    # A rank without tokens that count has 0 / 0 for means; it has no part in any.
    tokens_per_expert, router_prob_per_expert = (
        torch.where(own > 0, mean, torch.zeros_like(mean)) for mean in (tokens_per_expert, router_prob_per_expert)
    )
    part = own / all_reduce(own, operation="count the routed tokens of all ranks").clamp(min=1)
    tokens = all_reduce(tokens_per_expert * part, operation="average the expert loads over all ranks")
    micro_batches = _STEP.num_micro_batches if _STEP is not None else 1
    return tokens, _GlobalMean.apply(router_prob_per_expert, part, (dist.get_world_size(), micro_batches))


def own_mask(attention_mask: Tensor, rows: int, state: ParallelState) -> Tensor:
    """The part of a padding mask `(B, S)` that belongs to this rank's `rows = B * s` router rows."""
    if attention_mask.numel() == rows:
        return attention_mask
    return slice_dimension(attention_mask, rows // attention_mask.shape[0], state, dim=1)
