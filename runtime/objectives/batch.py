"""What an objective computes from: the hidden states of one micro-batch on one rank, and the documents that it holds.

row        chosen_0 chosen_0 chosen_0 rejected_0 | rejected_0 chosen_1 rejected_1 padding      | between two SP ranks
index      0        0        0        1          | 1          2        3          4
document_sums((s,)) -> (5,)   the same on both ranks: each adds up its slice, then they are added up

s tokens of this rank's slice   H hidden size   D documents of the whole row
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from patchgen.kernels.loss.token_log_probs import per_token, token_log_probs
from patchgen.runtime import model_calls
from patchgen.runtime.objectives.base import Objective, sources_of
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.collectives import all_reduce, gather_rows
from patchgen.runtime.parallel.loss import current_step
from patchgen.runtime.parallel.state import ParallelState

OF_DOCUMENTS = "document_"
"""Names of what a micro-batch says of its documents begin with it; the model does not take them."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, within the forward of the model.

    Attributes:
        targets: `(s,)`, the token that each position predicts; IGNORED where nothing is learned.
        ids: `(s,)`, the tokens.
        index: `(s,)`, the number of each token's document.
        num_documents: D.
        num_samples: so many of them, the first, are samples; the others are padding.
        padding: the id of the padding token; None: there is none.
        state: the ranks.
        extra: what the micro-batch says of its documents besides, by name without `document_`: `labels` ...
        hidden: `(s, H)`.
        head: maps `[1, C, H]` to `[1, C, V]`.
        reference: `(D,)`, see `Objective.needs_reference`; None where there is none.
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
        """The log-probability of each target, `(s,)` in fp32 or wider; 0 where nothing is learned."""
        head, hidden = self._of_forward()
        return token_log_probs(head, hidden, self.targets)

    def per_token(self, function: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
        """What a function makes of the logits of each token; see `kernels.loss.token_log_probs.per_token`."""
        head, hidden = self._of_forward()
        return per_token(head, hidden, function, *given)

    def scores(self) -> Tensor:
        """What the head gives for each token, `(s, scores)` in fp32 or wider."""
        head, hidden = self._of_forward()
        scores = head(hidden.unsqueeze(0)).squeeze(0)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    # ---------------------------------------------------------------------------------- of each document

    def document_sums(self, values: Tensor) -> Tensor:
        """The sums over the tokens of each document, `(D, ...)`, of `(s, ...)`; over all ranks that share the row."""
        sums = values.new_zeros(self.num_documents, *values.shape[1:]).index_add(0, self.index, values)
        if self.state.sp == 1:
            return sums
        parts = gather_rows(sums, self.state.sp_group, operation="add up what slices hold of each document")
        return parts.unflatten(0, (self.state.sp, -1)).sum(0)

    def document_log_probs(self) -> Tensor:
        """The log-probability of what is learned of each document, `(D,)`."""
        return self.document_sums(self.token_log_probs())

    def document_scores(self) -> Tensor:
        """What the head gives for the last token of each document, `(D, scores)` in fp32 or wider."""
        return self.document_sums(torch.where(self.last_tokens().unsqueeze(1), self.scores(), 0))

    def last_tokens(self) -> Tensor:
        """Bool `(s,)`: the last token of each document that is not `padding`, as upstream's classifiers choose it."""
        place = self._places()
        counts = place if self.padding is None else place.masked_fill(self.ids == self.padding, 0)
        return place == self.document_max(counts)[self.index]

    def ends_of_learned(self) -> Tensor:
        """Bool `(s, 2)`: the first token of each document that is learned, and the last."""
        place = self._places()
        learned = torch.stack([-place, place], dim=1).where(self.is_learned[:, None], torch.iinfo(place.dtype).min)
        first, last = self.document_max(learned)[self.index].unbind(1)  # of what predicts them: they stand one further
        return torch.stack([place == 1 - first, place == last + 1], dim=1)

    def document_max(self, values: Tensor) -> Tensor:
        """The largest over the tokens of each document, `(D, ...)`, of `(s, ...)`; over all ranks that share the row."""
        lowest = torch.finfo(values.dtype).min if values.is_floating_point() else torch.iinfo(values.dtype).min
        index = self.index.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
        top = values.new_full((self.num_documents, *values.shape[1:]), lowest).scatter_reduce(0, index, values, "amax")
        if self.state.sp > 1:
            told = "find the largest of each document"
            top = all_reduce(top, group=self.state.sp_group, op=dist.ReduceOp.MAX, operation=told)
        return top

    def _places(self) -> Tensor:
        """`(s,)`: the place of each token in the whole row, from 1."""
        return torch.arange(len(self.ids), device=self.ids.device) + 1 + self.state.sp_rank * len(self.ids)

    def pairs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of `(D, ...)` that are of chosen and of rejected documents, `(pairs, ...)` each."""
        return values[0 : self.num_samples : 2], values[1 : self.num_samples : 2]

    def _of_forward(self) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The head and the hidden states."""
        assert self.head is not None and self.hidden is not None, "a batch has them within the forward (`computing`)"
        return self.head, self.hidden


# ------------------------------------------------------------------------------------ around the forward


def inputs_of(rows: Mapping[str, Any]) -> dict[str, Any]:
    """What of a micro-batch the model takes."""
    return {name: value for name, value in rows.items() if not name.startswith(OF_DOCUMENTS)}


def split(
    rows: Mapping[str, Any], state: ParallelState, device: torch.device, padding: int | None
) -> tuple[dict[str, Any], Batch]:
    """The inputs of the model, on the host, and what the objective is told of them, on the device.

    Args:
        rows: of this rank, on the host: `input_ids`, `shift_labels` `(1, s)`, `cu_seq_lens_q` of the whole row if it holds
            several documents, `document_sources` `(documents,)`: samples, then padding.
        padding: the id of the padding token.

    Raises:
        ValueError: several rows, or no `document_sources`.
    """
    inputs = inputs_of(rows)
    extra = {name.removeprefix(OF_DOCUMENTS): value for name, value in rows.items() if name not in inputs}
    ids = inputs["input_ids"]
    if ids.shape[0] != 1:
        raise ValueError(f"An objective takes one packed row at a time, and this batch has {ids.shape[0]}.")
    place = torch.arange(ids.shape[1]) + ids.shape[1] * state.sp_rank
    inner = inputs["cu_seq_lens_q"][1:-1] if "cu_seq_lens_q" in inputs else place[:0]
    index = torch.bucketize(place, inner.to(place.dtype), right=True)
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


def computing(function: Callable[[Batch], Tensor], batch: Batch) -> Callable[..., Tensor]:
    """`function` for the seam of the loss: of the head and the hidden states that the model comes to."""

    def of_hidden(head: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        apart = model_calls.documents_apart()
        packed = hidden_states if apart is None else apart.packed(hidden_states)
        return function(replace(batch, head=head, hidden=packed.flatten(0, 1)))

    return of_hidden


def share(objective: Objective, batch: Batch) -> Callable[..., Tensor]:
    """This rank's share of the loss of the step that is live (`parallel.loss.step`), for the seam of the loss."""
    ranks = 1 if objective.per == "label" else batch.state.sp  # each of them has the whole

    def divided(known: Batch) -> Tensor:
        items = current_step().num_items
        assert items is not None, "a live step of a run has counted its items before it began"
        return objective.loss(known) / (items * ranks)

    return computing(divided, batch)
