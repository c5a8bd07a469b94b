"""Contrastive text embeddings with in-batch negatives (InfoNCE; van den Oord et al., 2018).

    loss = cross_entropy(cosine(anchor, every positive of the row) / temperature, its own positive)

A mean over pairs. A text's embedding is the hidden state of its last token. The negatives are the positives of the other
pairs in the packed row, so `data.tokens_per_batch` decides their number. The export is the base model, which loads in plain
transformers (`AutoModel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from patchgen.runtime.objectives.base import BASE, Objective
from patchgen.runtime.objectives.batch import Batch


@dataclass(frozen=True)
class Embedding(Objective):
    """Contrastive embeddings.

    Attributes:
        temperature: divides the cosine similarities.
    """

    temperature: float = 0.05

    kinds: ClassVar[tuple[str, ...]] = ("similar",)
    head: ClassVar = BASE
    per: ClassVar = "pair"

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}.")

    def loss(self, batch: Batch) -> Tensor:
        anchors, positives = batch.pairs(normalize(batch.document_scores(), dim=-1))
        similarity = anchors @ positives.T / self.temperature
        return cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device), reduction="sum")
