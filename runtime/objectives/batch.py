"""The inputs of an objective: the hidden states of one micro-batch on one rank, and its documents.

row        chosen_0 chosen_0 chosen_0 rejected_0 | rejected_0 chosen_1 rejected_1 padding      | between two SP ranks
index      0        0        0        1          | 1          2        3          4
document_sums((s,)) -> (5,)   the same on both ranks: the sums of all slices are summed

s tokens of this rank's slice   H hidden size   D documents of the full row   C tokens of a chunk   V outputs of the head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from patchgen.kernels.loss.token_log_probs import per_token, token_log_probs
from patchgen.runtime import model_calls
from patchgen.runtime.objectives.base import Objective, sources_of
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.collectives import gather_rows
from patchgen.runtime.parallel.loss import current_step
from patchgen.runtime.parallel.state import ParallelState

DOCUMENT_PREFIX = "document_"
"""Prefix of a micro-batch's fields about its documents, which are no model inputs."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, within the forward of the model.

    Attributes:
        targets: `(s,)`, the token that each position predicts; IGNORED for positions without a loss.
        ids: `(s,)`, the tokens.
        index: `(s,)`, the index of each token's document.
        num_documents: D.
        num_samples: the first documents are samples; the others are padding.
        padding: the id of the padding token; None: there is none.
        state: the ranks.
        extra: the micro-batch's other fields about documents, without their prefix `document_`: `labels` ...
        hidden: `(s, H)`.
        head: maps `[1, C, H]` to `[1, C, V]`.
        reference: `(D,)`, see `Objective.needs_reference`; None if it is not needed.
        teacher: what `Objective.of_teacher` returned.
    """

    targets: Tensor
    ids: Tensor
    index: Tensor
    num_documents: int
    num_samples: int
    padding: int | None
    state: ParallelState
    extra: Mapping[str, Any]
    hidden: Tensor | None = None
    head: Callable[[Tensor], Tensor] | None = None
    reference: Tensor | None = None
    teacher: Any = None

    @property
    def is_learned(self) -> Tensor:
        """Bool `(s,)`."""
        return self.targets != IGNORED

    # ------------------------------------------------------------------------------------- of each token

    def token_log_probs(self) -> Tensor:
        """The log-probability of each target, `(s,)` in fp32 or wider; 0 for positions without a loss."""
        head, hidden = self._head_and_hidden()
        return token_log_probs(head, hidden, self.targets)

    def per_token(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Applies a function to each token's logits; see `kernels.loss.token_log_probs.per_token`."""
        head, hidden = self._head_and_hidden()
        return per_token(head, hidden, function, *inputs)

    def scores(self) -> Tensor:
        """The head's output for each token, `(s, scores)` in fp32 or wider."""
        head, hidden = self._head_and_hidden()
        scores = head(hidden.unsqueeze(0)).squeeze(0)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    # ---------------------------------------------------------------------------------- of each document

    def document_sums(self, values: Tensor) -> Tensor:
        """The sums over the tokens of each document, `(D, ...)`, of `(s, ...)`; over all ranks that share the row."""
        sums = values.new_zeros(self.num_documents, *values.shape[1:]).index_add(0, self.index, values)
        if self.state.sp == 1:
            return sums
        parts = gather_rows(sums, self.state.sp_group, operation="add up each document over its slices")
        return parts.unflatten(0, (self.state.sp, -1)).sum(0)

    def document_log_probs(self) -> Tensor:
        """The log-probability of each document's targets, `(D,)`."""
        return self.document_sums(self.token_log_probs())

    def document_scores(self) -> Tensor:
        """The head's output for the last token of each document, `(D, scores)` in fp32 or wider."""
        return self.document_sums(torch.where(self.last_tokens().unsqueeze(1), self.scores(), 0))

    def last_tokens(self) -> Tensor:
        """Bool `(s,)`: the last token of each document that is not `padding`, as upstream's classifiers choose it."""
        position = self._positions()
        candidates = position if self.padding is None else position.masked_fill(self.ids == self.padding, 0)
        return position == self.document_max(candidates)[self.index]

    def first_and_last_target(self) -> Tensor:
        """Bool `(s, 2)`: the first and the last token of each document that has a loss."""
        position = self._positions()
        lowest = torch.iinfo(position.dtype).min
        predicting = torch.stack([-position, position], dim=1).where(self.is_learned[:, None], lowest)
        first, last = self.document_max(predicting)[self.index].unbind(1)  # the targets are one position further
        return torch.stack([position == 1 - first, position == last + 1], dim=1)

    def document_max(self, values: Tensor) -> Tensor:
        """The maxima over the tokens of each document, `(D, ...)`, of `(s, ...)`; over all ranks that share the row."""
        lowest = torch.finfo(values.dtype).min if values.is_floating_point() else torch.iinfo(values.dtype).min
        index = self.index.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
        top = values.new_full((self.num_documents, *values.shape[1:]), lowest).scatter_reduce(0, index, values, "amax")
        if self.state.sp == 1:
            return top
        parts = gather_rows(top, self.state.sp_group, operation="find the maximum of each document")
        return parts.unflatten(0, (self.state.sp, -1)).amax(0)

    def _positions(self) -> Tensor:
        """`(s,)`: the position of each token in the full row, from 1."""
        return torch.arange(len(self.ids), device=self.ids.device) + 1 + self.state.sp_rank * len(self.ids)

    def pairs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The values `(D, ...)` of chosen and of rejected documents, `(pairs, ...)` each."""
        return values[0 : self.num_samples : 2], values[1 : self.num_samples : 2]

    def _head_and_hidden(self) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        assert self.head is not None and self.hidden is not None, "only set within the forward (`at_loss_seam`)"
        return self.head, self.hidden


# ------------------------------------------------------------------------------------ around the forward


def inputs_of(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a micro-batch that are model inputs."""
    return {name: value for name, value in rows.items() if not name.startswith(DOCUMENT_PREFIX)}


def split(
    rows: Mapping[str, Any], state: ParallelState, device: torch.device, padding: int | None
) -> tuple[dict[str, Any], Batch]:
    """The inputs of the model, on the host, and the objective's batch, on the device.

    Args:
        rows: of this rank, on the host: `input_ids`, `shift_labels` `(1, s)`, `cu_seq_lens_q` of the full row if it has
            several documents, `document_sources` `(documents,)`: samples, then padding.
        padding: the id of the padding token.

    Raises:
        ValueError: several rows, or no `document_sources`.
    """
    inputs = inputs_of(rows)
    extra = {name.removeprefix(DOCUMENT_PREFIX): value for name, value in rows.items() if name not in inputs}
    ids = inputs["input_ids"]
    if ids.shape[0] != 1:
        raise ValueError(f"An objective takes one packed row at a time, and this batch has {ids.shape[0]}.")
    position = torch.arange(ids.shape[1]) + ids.shape[1] * state.sp_rank
    inner = inputs["cu_seq_lens_q"][1:-1] if "cu_seq_lens_q" in inputs else position[:0]
    index = torch.bucketize(position, inner.to(position.dtype), right=True)
    batch = Batch(
        targets=inputs["shift_labels"][0].to(device, non_blocking=True),
        ids=ids[0].to(device, non_blocking=True),
        index=index.to(device, non_blocking=True),
        num_documents=len(inner) + 1,
        num_samples=int((sources_of(rows) >= 0).sum()),
        padding=padding,
        state=state,
        extra=extra,
    )
    return inputs, batch


def at_loss_seam(function: Callable[[Batch], Tensor], batch: Batch) -> Callable[..., Tensor]:
    """`function` as the loss seam calls it: with the model's head and hidden states."""

    def compute(head: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        apart = model_calls.documents_apart()
        packed = hidden_states if apart is None else apart.packed(hidden_states)
        return function(replace(batch, head=head, hidden=packed.flatten(0, 1)))

    return compute


def loss_share(objective: Objective, batch: Batch) -> Callable[..., Tensor]:
    """This rank's share of the loss of the current step (`parallel.loss.step`), as the loss seam calls it."""
    ranks = 1 if objective.per == "label" else batch.state.sp  # each SP rank computes the full sum

    def compute(complete: Batch) -> Tensor:
        items = current_step().num_items
        assert items is not None, "a training step counts its items before it begins"
        return objective.loss(complete) / (items * ranks)

    return at_loss_seam(compute, batch)
