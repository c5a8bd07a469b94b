"""A reward model (Bradley and Terry, 1952): one score per document, higher for the chosen one of a pair.

    loss = -logsigmoid(reward(chosen) - reward(rejected)) + center * (reward(chosen) + reward(rejected))^2

A mean over pairs, as TRL's RewardTrainer computes it. The head is upstream's sequence classifier with one label: the
export loads in plain transformers (`AutoModelForSequenceClassification`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import logsigmoid

from patchgen.runtime.objectives.base import CLASSIFICATION, Objective
from patchgen.runtime.objectives.batch import Batch


@dataclass(frozen=True)
class Reward(Objective):
    """A reward model.

    Attributes:
        center: weight of the term that keeps the rewards of a pair around 0.
    """

    center: float = 0.0

    kinds: ClassVar[tuple[str, ...]] = ("preference",)
    head: ClassVar = CLASSIFICATION
    per: ClassVar = "pair"

    def __post_init__(self) -> None:
        if not self.center >= 0:
            raise ValueError(f"center must be at least 0, not {self.center}.")

    @property
    def scores(self) -> int:
        return 1

    def loss(self, batch: Batch) -> Tensor:
        chosen, rejected = batch.pairs(batch.document_scores()[:, 0])
        loss = -logsigmoid(chosen - rejected)
        if self.center:
            loss = loss + self.center * (chosen + rejected).square()
        return loss.sum()
