"""Sequence classification: a class of each document, or with one label a number (regression).

    classes   cross-entropy of the scores of the last token, a mean over documents
    numbers   squared error, a mean over documents

As transformers' `ForSequenceClassificationLoss` for problem types "single_label_classification" and "regression". The
head is upstream's: the export loads in plain transformers (`AutoModelForSequenceClassification`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from patchgen.runtime.objectives.base import Objective
from patchgen.runtime.objectives.batch import Batch


@dataclass(frozen=True)
class Classification(Objective):
    """Sequence classification.

    Attributes:
        num_labels: classes; 1: numbers.
    """

    num_labels: int = 2

    kinds: ClassVar[tuple[str, ...]] = ("classification",)
    per: ClassVar = "document"

    def __post_init__(self) -> None:
        if not self.num_labels >= 1:
            raise ValueError(f"num_labels must be at least 1, not {self.num_labels}.")

    @property
    def scores(self) -> int:
        return self.num_labels

    def loss(self, batch: Batch) -> Tensor:
        scores = batch.document_scores()[: batch.num_samples]
        labels = batch.extra["labels"][: batch.num_samples]
        if self.num_labels == 1:
            return mse_loss(scores[:, 0], labels.to(scores.device, scores.dtype), reduction="sum")
        outside = labels[(labels != labels.round()) | (labels < 0) | (labels >= self.num_labels)]  # on the host
        if len(outside):
            raise ValueError(
                f"A document has the label {float(outside[0]):g}; with num_labels = {self.num_labels} labels are 0 to "
                f"{self.num_labels - 1}."
            )
        return cross_entropy(scores, labels.to(scores.device).long(), reduction="sum")
