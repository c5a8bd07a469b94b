"""A training objective: one small class, built in or the user's own (`objective.name: module:Class` in the recipe).

    @dataclass(frozen=True)
    class Unlikely(Objective):                      # `objective: {name: my_losses:Unlikely, options: {strength: 2}}`
        strength: float = 1.0                       # an option of the recipe

        def loss(self, batch):                      # within the forward of the model, of one micro-batch on one rank
            log_probs = batch.token_log_probs()     # (s,): of this rank's s tokens, without the full logits
            return -self.strength * torch.log1p(-log_probs.exp()).where(batch.is_learned, 0).sum()

The loss of a step is the sum of what `loss` returns, over all micro-batches and ranks (of documents and pairs, once for the
ranks that share a row), divided by the items of the step (`per`). An objective need not handle ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from patchgen.runtime.objectives.batch import Batch

Items = Literal["label", "document", "pair"]
CLASSIFICATION, TOKEN, ANSWERS, BASE = "classification", "token", "answers", "base"
"""Heads that replace the language-model head: sequence classifier, token classifier, question answering, none."""


@dataclass(frozen=True)
class Objective:
    """One objective. Its fields are the options of the recipe.

    Attributes:
        kinds: supported `data.kind`; empty: any.
        per: what the loss is a mean over. "label": tokens with a loss; `loss` returns the sum over those of this rank's
            slice. "document" or "pair" (chosen, rejected): `loss` returns the sum over the documents of the full row, the
            same number on each rank that shares the row.
        head: the head that replaces the language-model head; None: keep it.
        dropout: of the head, if it has one.
        needs_reference: `loss` uses `batch.reference`: the log-probabilities of the documents before training.
        needs_teacher: `loss` uses `batch.teacher`: what `of_teacher` returned for the model in section `teacher`.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    per: ClassVar[Items] = "label"
    head: ClassVar[str | None] = None
    dropout: ClassVar[float | None] = None
    needs_reference: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False

    @property
    def is_models_own(self) -> bool:
        """Whether the model computes the loss itself: true for `NextToken`, not for classes derived from it."""
        return type(self) is NextToken

    @property
    def scores(self) -> int | None:
        """The number of classes of the head; None: it has none."""
        return None

    def loss(self, batch: Batch) -> Tensor:
        """A scalar in fp32: the sum over the items of this micro-batch (`per`).

        Raises:
            NotImplementedError: the class does not define it; only `NextToken` uses the model's own loss.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method loss(batch).")

    def of_teacher(self, batch: Batch) -> Any:
        """Computes `batch.teacher` from the teacher's forward of the same tokens, without gradients."""
        raise NotImplementedError(f"{type(self).__name__} needs a teacher and has no method of_teacher(batch).")

    def require_valid(self, row: Mapping[str, Any]) -> None:
        """Checks a full micro-batch on the host before the step; an error here ends every rank.

        Raises:
            DataError: `loss` cannot handle the row.
        """

    def count(self, row: Mapping[str, Any]) -> int:
        """The number of documents (`per` "document") or pairs in a full micro-batch on the host, without padding."""
        documents = int((sources_of(row) >= 0).sum())
        return documents if self.per == "document" else documents // 2


@dataclass(frozen=True)
class NextToken(Objective):
    """Next-token prediction: the model's own loss, with the recipe's kernels."""

    kinds: ClassVar[tuple[str, ...]] = ("text", "chat", "multimodal")


def sources_of(row: Mapping[str, Any]) -> Tensor:
    """The source of each document of a micro-batch, `(documents,)`; -1 is padding."""
    if row.get("document_sources") is None:
        raise ValueError(
            "The rows have no document_sources, so samples and padding documents cannot be distinguished. Use a loader of "
            "patchgen.runtime.data, or add document_sources: a source index per document, -1 for padding."
        )
    return row["document_sources"]
