"""Sequence classification: one class per document, or regression with a single label.

    classification   cross-entropy of the last token's scores, a mean over documents
    regression       squared error, a mean over documents

As transformers' `ForSequenceClassificationLoss` for problem types "single_label_classification" and "regression". The
head is upstream's: the export loads in plain transformers (`AutoModelForSequenceClassification`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from patchgen.runtime.data.problems import DataError
from patchgen.runtime.objectives.base import CLASSIFICATION, Objective, sources_of
from patchgen.runtime.objectives.batch import Batch


@dataclass(frozen=True)
class Classification(Objective):
    """Sequence classification.

    Attributes:
        num_labels: classes; 1: regression.
    """

    num_labels: int = 2

    kinds: ClassVar[tuple[str, ...]] = ("classification",)
    head: ClassVar = CLASSIFICATION
    per: ClassVar = "document"

    def __post_init__(self) -> None:
        if not self.num_labels >= 1:
            raise ValueError(f"num_labels must be at least 1, not {self.num_labels}.")

    @property
    def scores(self) -> int:
        return self.num_labels

    def require_valid(self, row: Mapping[str, Any]) -> None:
        """Refuses labels that are not a class: in the forward only one rank would fail, and the others would hang."""
        if self.num_labels == 1:
            return
        labels = row["document_labels"][sources_of(row) >= 0]
        outside = labels[(labels != labels.round()) | (labels < 0) | (labels >= self.num_labels)]
        if len(outside):
            raise DataError(
                f"A document has the label {float(outside[0]):g}; with objective.options.num_labels = {self.num_labels} "
                f"labels are 0 to {self.num_labels - 1}."
            )

    def loss(self, batch: Batch) -> Tensor:
        scores = batch.document_scores()[: batch.num_samples]
        labels = batch.extra["labels"][: batch.num_samples]
        if self.num_labels == 1:
            return mse_loss(scores[:, 0], labels.to(scores.device, scores.dtype), reduction="sum")
        return cross_entropy(scores, labels.to(scores.device).long(), reduction="sum")
