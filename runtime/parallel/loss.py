"""Losses that are means over the global batch: all ranks, all micro-batches.

A rank's loss is its *share*: the shares of all ranks and micro-batches add up to the loss, and their gradients to its
gradient. FSDP2 is told to sum (`sharding.py`), so no factor of any mesh size appears anywhere.

    items = loss.count_items(micro_batches, device)         # labels that count, over the whole step
    tokens = loss.count_tokens(micro_batches, device)       # tokens without padding, over the whole step
    for batch in micro_batches:
        with loss.step(items, len(micro_batches), num_tokens=tokens):
            model(**batch).loss.backward()

The loss of routers has a file of its own (`router_loss.py`).

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
    """What one optimizer step covers, over all ranks and micro-batches.

    Attributes:
        num_items: labels that count; None: those of the micro-batch, on all ranks.
        num_micro_batches: of one rank.
        num_tokens: tokens that are not padding; None: those of the micro-batch, on all ranks.
        router_loss: whether the loss of the routers is part of the loss.
        objective: what computes this rank's share of another loss than the next token's, of the head and the hidden
            states `(B, s, H)`; None: the next token's.
        read_losses: is handed the loss of each token of this rank `(B * s,)`, not divided, by the next token's loss.
        counts_targets: the labels that a decoder is handed now are those that were counted (`objectives/encoder_decoder.py`).
    """

    num_items: Tensor | int | None = None
    num_micro_batches: int = 1
    num_tokens: Tensor | int | None = None
    router_loss: bool = True
    objective: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None
    read_losses: Callable[[Tensor], None] | None = None
    counts_targets: bool = False


_ALONE = Step()
"""A micro-batch outside of any step is a step of its own."""


def current_step() -> Step:
    """The step of which losses are shares now."""
    return parallel.context().step or parallel.context_without_state().step or _ALONE  # one may begin before its state is live


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
        num_tokens: needed where a router loss is accumulated over micro-batches.
    """
    with _within(Step(num_items, num_micro_batches, num_tokens, router_loss, objective, read_losses)):
        yield


@contextlib.contextmanager
def counted_targets() -> Iterator[None]:
    """Within the block, a decoder is handed the labels that the step counted."""
    with _within(replace(current_step(), counts_targets=True)) if in_step() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _within(step: Step) -> Iterator[None]:
    now = parallel.context()
    before, now.step = now.step, step
    try:
        yield
    finally:
        now.step = before


LOCAL_TERMS = "local_loss_terms"
"""Of a generated head: what it adds to its loss that is a number of one rank's tokens, as source."""


OWN_LOSS = "own_loss"
"""Of a generated head whose loss is upstream's own mean over a call: the loss, as source."""


LOSS_FORM = "loss_form"
"""Of a generated head that writes its cross entropy out: "aligned" or "shifted" (`kernels.causal_lm_loss`)."""


def upstream_labels(head: type | None, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of whole rows, with `labels` not yet shifted, as upstream's class of a generated head takes it."""
    if getattr(head, LOSS_FORM, "") != "aligned" or batch.get("labels") is None:
        return batch
    return {**batch, "labels": F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()}


def not_shared(head: object) -> str:
    """Why the loss of a generated head, a class or a model, is not a sum of shares; empty if it is one."""
    name = head.__name__ if isinstance(head, type) else type(head).__name__
    if own := getattr(head, OWN_LOSS, ()):
        return own_mean(name, *own)
    terms = getattr(head, LOCAL_TERMS, ())
    return _not_shared(name, terms) if terms else ""


def own_mean(name: str, source: str) -> str:
    """Why a head does not train in steps whose loss is upstream's own."""
    return (
        f"{name} computes a loss of its own, {source}, which has no share for several ranks or micro-batches: it is "
        "upstream's mean over the call. Train it without a parallel state, or hand over no labels."
    )


def _not_shared(name: str, terms: tuple[str, ...]) -> str:
    return (
        f"{name} adds {', '.join(terms)} to its loss, a number of one rank's tokens: the numbers of several ranks or "
        "micro-batches do not add up to that of the step. Train it on one rank with one micro-batch per step, or "
        "without that term."
    )


def require_shares(terms: tuple[str, ...], state: ParallelState) -> None:
    """Raises ValueError where a loss with `terms` of one rank's tokens would be added up over ranks or micro-batches."""
    if terms and (state.config.world > 1 or current_step().num_micro_batches > 1):
        raise ValueError(_not_shared("The model", terms))


def in_step() -> bool:
    """Whether the loss that is computed now is a share of a step: nobody reads the logits."""
    return current_step() is not _ALONE


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


def count_tokens(micro_batches: Iterable[Mapping[str, Any]], device: torch.device | str) -> Tensor:
    """The tokens in the micro-batches of all ranks that are not padding: on `device`, at least 1; one collective."""
    total = torch.as_tensor(sum(map(real_tokens, micro_batches)), device=device, dtype=torch.long)
    if dist.is_initialized():
        total = all_reduce(total, operation="count the tokens of the step")
    return total.clamp(min=1)


def real_tokens(batch: Mapping[str, Any]) -> Tensor | int:
    """The tokens of a batch, or of a slice of one, that are not padding."""
    given = [batch[name] for name in ("real_tokens", "attention_mask") if batch.get(name) is not None]
    if given:
        return given[0].sum()
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    return tokens.shape[0] * tokens.shape[1]


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
        if current_step().num_items is not None:
            arguments["num_items_in_batch"] = current_step().num_items
        else:
            count = (arguments["shift_labels"] != IGNORED).sum()
            arguments["num_items_in_batch"] = all_reduce(count, operation="count the labels of a batch").clamp(min=1)
    return slice_dimension(labels, s, state, dim=1), arguments
