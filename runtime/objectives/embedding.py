"""Embeddings of texts: those whose meaning is near come near, the others of the row go away (van den Oord et al., 2018).

    loss = cross_entropy(cosine(anchor, every positive of the row) / temperature, its own positive)

A mean over pairs. A text's embedding is the hidden state of its last token. A pair is told from the others of its packed row:
`data.tokens_per_batch` says how many they are. The model is the base model: the export loads in plain transformers
(`AutoModel`).
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
    """Embeddings.

    Attributes:
        temperature: the cosines are divided by it.
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
        likeness = anchors @ positives.T / self.temperature
        return cross_entropy(likeness, torch.arange(len(likeness), device=likeness.device), reduction="sum")
