"""Losses that are means over the global batch: all ranks, all micro-batches.

A rank's loss is its *share*: the shares of all ranks and micro-batches sum to the loss, and their gradients to its
gradient. FSDP2 sums gradients (`sharding.py`), so no factor of a mesh size appears anywhere.

    items = loss.count_items(micro_batches, device)         # labels that are not ignored, in the whole step
    tokens = loss.count_tokens(micro_batches, device)       # tokens without padding, in the whole step
    for batch in micro_batches:
        with loss.step(items, len(micro_batches), num_tokens=tokens):
            model(**batch).loss.backward()

The load-balancing loss of routers is in `router_loss.py`.

    B rows   s tokens of this rank's slice
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from patchgen.runtime import parallel
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.collectives import all_gather, all_reduce
from patchgen.runtime.parallel.sequence import slice_dimension
from patchgen.runtime.parallel.state import ParallelState


@dataclass(frozen=True)
class Step:
    """One optimizer step, over all ranks and micro-batches.

    Attributes:
        num_items: labels that are not ignored; None: those of the micro-batch, on all ranks.
        num_micro_batches: of one rank.
        num_tokens: tokens that are not padding; None: those of the micro-batch, on all ranks.
        router_loss: whether the load-balancing loss is part of the loss.
        objective: computes this rank's share of a loss other than next-token prediction, from the head and the hidden
            states `(B, s, H)`; None: next-token prediction.
        read_losses: called by the next-token loss with the undivided loss of each token of this rank, `(B * s,)`.
        counts_targets: whether the labels that a decoder gets now were counted in `num_items`
            (`objectives/encoder_decoder.py`).
    """

    num_items: Tensor | int | None = None
    num_micro_batches: int = 1
    num_tokens: Tensor | int | None = None
    router_loss: bool = True
    objective: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None
    read_losses: Callable[[Tensor], None] | None = None
    counts_targets: bool = False


_DEFAULT_STEP = Step()
"""A micro-batch outside of a `step` block is a step of its own."""


def current_step() -> Step:
    """The step that losses are currently shares of."""
    # A step may begin before a parallel state is activated.
    return parallel.context().step or parallel.context_without_state().step or _DEFAULT_STEP


@contextlib.contextmanager
def step(
    num_items: Tensor | int,
    num_micro_batches: int = 1,
    *,
    num_tokens: Tensor | int | None = None,
    router_loss: bool = True,
    objective: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None,
    read_losses: Callable[[Tensor], None] | None = None,
) -> Iterator[None]:
    """Within the block, losses are shares of the step that these numbers describe (`Step`).

    Args:
        num_tokens: required if a router loss is accumulated over micro-batches.
    """
    with _within(Step(num_items, num_micro_batches, num_tokens, router_loss, objective, read_losses)):
        yield


@contextlib.contextmanager
def counted_targets() -> Iterator[None]:
    """Within the block, the labels that a decoder gets are those that the step counted."""
    with _within(replace(current_step(), counts_targets=True)) if in_step() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _within(step: Step) -> Iterator[None]:
    context = parallel.context()
    before, context.step = context.step, step
    try:
        yield
    finally:
        context.step = before


OWN_LOSS = "own_loss"
"""Attribute of a generated head whose loss is upstream's mean over a call: the source of that loss."""

LOSS_FORM = "loss_form"
"""Attribute of a generated head with inline cross entropy: "aligned" or "shifted", the forms of
`runtime/written_losses.py` (computed by `kernels.loss.causal_lm_loss`)."""


def upstream_labels(head: type | None, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of full rows with unshifted `labels`, with the labels that upstream's class of a generated head expects."""
    if getattr(head, LOSS_FORM, "") != "aligned" or batch.get("labels") is None:
        return batch
    return {**batch, "labels": F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()}


def why_not_additive(head: object) -> str:
    """Why the loss of a generated head (class or model) is not a sum of shares; "" if it is one."""
    name = head.__name__ if isinstance(head, type) else type(head).__name__
    own_loss = getattr(head, OWN_LOSS, ())
    return upstream_mean_message(name, *own_loss) if own_loss else ""


def upstream_mean_message(name: str, source: str) -> str:
    """The error of a head whose loss is upstream's mean over a call."""
    return (
        f"{name} computes a loss of its own, {source}, upstream's mean over one call, which cannot be summed over ranks or "
        "micro-batches. To fix: train it without a parallel state, or pass no labels."
    )


def in_step() -> bool:
    """Whether the current loss is a share of a step, so that nothing reads the logits."""
    return current_step() is not _DEFAULT_STEP


def count_items(micro_batches: Iterable[Mapping[str, Any]], device: torch.device | str) -> Tensor:
    """The number of labels that are not ignored in the micro-batches of all ranks, at least 1; one collective.

    Args:
        micro_batches: with `shift_labels` of this rank's slice (`batch.slice_batch` adds them).
        device: of the result.
    """
    local = sum((batch["shift_labels"] != IGNORED).sum() for batch in micro_batches)
    total = torch.as_tensor(local, device=device, dtype=torch.long)
    if dist.is_initialized():
        total = all_reduce(total, operation="count the labels of the step")
    return total.clamp(min=1)


def count_tokens(micro_batches: Iterable[Mapping[str, Any]], device: torch.device | str) -> Tensor:
    """The number of tokens without padding in the micro-batches of all ranks, at least 1, on `device`; one collective."""
    total = torch.as_tensor(sum(map(real_tokens, micro_batches)), device=device, dtype=torch.long)
    if dist.is_initialized():
        total = all_reduce(total, operation="count the tokens of the step")
    return total.clamp(min=1)


def real_tokens(batch: Mapping[str, Any]) -> Tensor | int:
    """The number of tokens without padding of a batch, or of a slice of one."""
    masks = [batch[name] for name in ("real_tokens", "attention_mask") if batch.get(name) is not None]
    if masks:
        return masks[0].sum()
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    return tokens.shape[0] * tokens.shape[1]


def global_labels(
    labels: Tensor, hidden_states: Tensor, arguments: dict[str, Any], state: ParallelState
) -> tuple[Tensor, dict[str, Any]]:
    """The labels and loss arguments of this rank, for `ops.causal_lm_loss`.

    Args:
        labels: `(B, s)` or `(B, s * sp)`, unshifted.
        hidden_states: `(B, s, H)`.
        arguments: of the loss; `shift_labels` and `num_items_in_batch` are added if missing.

    Returns:
        `labels` `(B, s)` and the arguments with `shift_labels` `(B, s)` and `num_items_in_batch`, by default that of the
        `step`, else the number of labels of this micro-batch on all ranks.
    """
    s = hidden_states.shape[1]
    arguments = dict(arguments)
    shifted = arguments.get("shift_labels")
    if shifted is None:
        if state.sp > 1 and labels.shape[1] == s:
            firsts = all_gather(
                labels[:, :1], state.sp_group, dim=1, operation="exchange the first labels of the slices"
            )
            following = F.pad(firsts, (0, 1), value=IGNORED)[:, state.sp_rank + 1, None]
            shifted = torch.cat([labels[:, 1:], following], dim=1)
        else:
            shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    arguments["shift_labels"] = slice_dimension(shifted, s, state, dim=1).contiguous()
    if arguments.get("num_items_in_batch") is None:
        if current_step().num_items is not None:
            arguments["num_items_in_batch"] = current_step().num_items
        else:
            count = (arguments["shift_labels"] != IGNORED).sum()
            arguments["num_items_in_batch"] = all_reduce(count, operation="count the labels of a batch").clamp(min=1)
    return slice_dimension(labels, s, state, dim=1), arguments
