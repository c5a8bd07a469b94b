"""Token classification and extractive question answering.

    classes   cross-entropy of each labelled token's scores, a mean over these tokens
    answers   mean of the cross-entropies of the answer's first and last token over its document, a mean over documents; a
              document without targets adds nothing; one whose answer `data.max_length` would cut is skipped

As transformers' `ForTokenClassificationLoss` and `ForQuestionAnsweringLoss`. The heads are upstream's: the exports load in
plain transformers (`AutoModelForTokenClassification`, `AutoModelForQuestionAnswering`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from patchgen.runtime.data.problems import DataError
from patchgen.runtime.objectives.base import ANSWERS, TOKEN, Objective
from patchgen.runtime.objectives.batch import Batch
from patchgen.runtime.parallel.batch import IGNORED


@dataclass(frozen=True)
class TokenClassification(Objective):
    """One class per token.

    Attributes:
        num_labels: classes.
        dropout: of the hidden states before their scores; upstream's is 0.1.
    """

    num_labels: int = 2
    dropout: float = 0.1

    kinds: ClassVar[tuple[str, ...]] = ("token_classes",)
    head: ClassVar = TOKEN

    def __post_init__(self) -> None:
        if not self.num_labels >= 2:
            raise ValueError(f"num_labels must be at least 2, not {self.num_labels}.")

    @property
    def scores(self) -> int:
        return self.num_labels

    def require_valid(self, row: Mapping[str, Any]) -> None:
        """Refuses a label that is not a class, as `Classification` does."""
        labels = row["labels"]
        outside = labels[(labels != IGNORED) & ((labels < 0) | (labels >= self.num_labels))]
        if len(outside):
            raise DataError(
                f"A token has the label {int(outside[0])}; with objective.options.num_labels = {self.num_labels} labels are "
                f"0 to {self.num_labels - 1}."
            )

    def loss(self, batch: Batch) -> Tensor:
        return cross_entropy(batch.scores(), batch.targets, reduction="sum", ignore_index=IGNORED)


@dataclass(frozen=True)
class QuestionAnswering(Objective):
    """Finds the answer: the tokens of a document that have a loss."""

    kinds: ClassVar[tuple[str, ...]] = ("answers",)
    head: ClassVar = ANSWERS
    per: ClassVar = "document"

    def loss(self, batch: Batch) -> Tensor:
        scores = batch.scores()
        top = batch.document_max(scores.detach())
        norm = batch.document_sums((scores - top[batch.index]).exp()).log() + top
        losses = torch.where(batch.first_and_last_target(), norm[batch.index] - scores, 0)
        return batch.document_sums(losses)[: batch.num_samples].sum() / 2
