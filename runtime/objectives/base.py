"""What a run learns: one small class, chosen in the recipe (`objective.name`) or the user's own (`module:Class`).

    @dataclass(frozen=True)
    class Unlikely(Objective):                      # `objective: {name: my_losses:Unlikely, options: {strength: 2}}`
        strength: float = 1.0                       # an option of the recipe

        def loss(self, batch):                      # within the forward of the model, of one micro-batch on one rank
            log_probs = batch.token_log_probs()     # (s,), without the full logits
            return -self.strength * torch.log1p(-log_probs.exp()).where(batch.is_learned, 0).sum()

The loss of a step is the sum of what `loss` returns, over all micro-batches and ranks, divided by the items of the step
(`per`). Nothing in a class knows of ranks.
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
"""The heads in the place of a language model's: a class of each document, of each token, the ends of an answer, none at all."""


@dataclass(frozen=True)
class Objective:
    """One objective. Its fields are the options of the recipe.

    Attributes:
        kinds: `data.kind` that it can learn from; empty: any.
        per: what the loss is a mean over. "label": tokens that are learned; `loss` returns the sum over those of this rank's
            slice. "document" or "pair" (chosen, rejected): `loss` returns the sum over the documents of the whole row, the
            same number on each rank that shares the row.
        head: what the model gets in the place of its language-model head; None: that stays.
        dropout: of the head, where it has one.
        needs_reference: whether it asks for `batch.reference`: the log-probabilities of the documents before training.
        needs_teacher: whether it asks for `batch.teacher`, what its `of_teacher` made of the model in section `teacher`.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    per: ClassVar[Items] = "label"
    head: ClassVar[str | None] = None
    dropout: ClassVar[float | None] = None
    needs_reference: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False

    @property
    def is_models_own(self) -> bool:
        """Whether the model computes the loss by itself: `NextToken` is meant, and no class derived from it."""
        return type(self) is NextToken

    @property
    def scores(self) -> int | None:
        """How many classes the head tells apart; None: it has none."""
        return None

    def loss(self, batch: Batch) -> Tensor:
        """A scalar in fp32: the sum over the items of this micro-batch (`per`).

        Raises:
            NotImplementedError: it has none; the model's own loss is taken for `NextToken` alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method loss(batch).")

    def of_teacher(self, batch: Batch) -> Any:
        """What `batch.teacher` is: computed by the teacher, without gradients, from the same tokens."""
        raise NotImplementedError(f"{type(self).__name__} needs a teacher and has no method of_teacher(batch).")

    def require_valid(self, row: Mapping[str, Any]) -> None:
        """Looks at a whole micro-batch on the host, before a step begins: what is raised here ends every rank.

        Raises:
            DataError: the row holds what `loss` cannot take.
        """

    def count(self, row: Mapping[str, Any]) -> int:
        """The documents, or pairs of them, of a whole micro-batch on the host."""
        documents = int((sources_of(row) >= 0).sum())
        return documents if self.per == "document" else documents // 2


@dataclass(frozen=True)
class NextToken(Objective):
    """The next token: the model's own loss, by the kernels of the recipe."""

    kinds: ClassVar[tuple[str, ...]] = ("text", "chat", "multimodal")


def sources_of(row: Mapping[str, Any]) -> Tensor:
    """The source of each document of a micro-batch, `(documents,)`; -1 is padding."""
    if row.get("document_sources") is None:
        raise ValueError(
            "This loader gives no document_sources: nothing says which documents of a row are samples and which padding."
        )
    return row["document_sources"]
