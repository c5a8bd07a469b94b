"""What a trainer takes batches from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchgen.runtime.data.collate import collate
from patchgen.runtime.data.problems import Counters, DataError

PADDING = -1
"""The source of a document that is none."""


def pair(chosen: dict[str, Tensor], rejected: dict[str, Tensor]) -> dict[str, Any]:
    """Two documents `(n,)` and `(m,)` as one sample `(n + m,)`, which `make_batch` takes apart again."""
    lengths = [len(half["input_ids"]) for half in (chosen, rejected)]
    return {name: torch.cat([chosen[name], rejected[name]]) for name in chosen} | {"lengths": lengths}


def make_batch(
    samples: Sequence[tuple[int, dict[str, Any]]], *, pad_to: int | None, pad_token_id: int
) -> dict[str, Any]:
    """The micro-batch of some samples, each with the number of its source: `collate.collate` of their documents.

    The halves of a pair are two documents, one after the other.

    Returns:
        besides: `document_sources` `(documents,)` int64, PADDING for what is none; where samples have a `label`,
        `document_labels` `(documents,)` float64, NaN for padding.
    """
    documents, sources, labels = [], [], []
    for source, sample in samples:
        halves = documents_of(sample)
        documents += halves
        sources += [source] * len(halves)
        labels += [sample["label"]] * len(halves) if "label" in sample else []
    batch = collate(documents, pad_to=pad_to, pad_token_id=pad_token_id)
    padding = len(batch["cu_seq_lens_q"]) - 1 - len(documents)
    batch["document_sources"] = torch.tensor([*sources, *[PADDING] * padding])
    if labels:
        batch["document_labels"] = torch.tensor([*labels, *[math.nan] * padding], dtype=torch.float64)
    return batch


def documents_of(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """The document that a sample is, or the two of a pair."""
    fields = {name: value for name, value in sample.items() if name not in ("lengths", "label")}
    if "lengths" not in sample:
        return [fields]
    halves = {name: value.split(sample["lengths"]) for name, value in fields.items()}
    return [{name: parts[half] for name, parts in halves.items()} for half in range(len(sample["lengths"]))]


@dataclass(frozen=True)
class Census:
    """All samples of a source: `lengths` `(documents,)` in tokens, and how many of them are learned."""

    lengths: np.ndarray
    learned: int


class Loader(ABC):
    """Micro-batches of one rank, whole: `parallel.batch.slice_batch` takes the slice of a sequence-parallel rank.

    All ranks have the same number of batches. Where samples end before a round of ranks is full, the ranks without
    samples get a batch of padding, none of whose tokens has a label.

    Attributes:
        counters: samples that were bad, skipped or truncated, by file and line.
        reads_a_share: whether these are of this batch group's samples only; otherwise of all samples, on every rank.
    """

    counters: Counters
    reads_a_share: bool = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    @abstractmethod
    def __next__(self) -> dict[str, Any]:
        """The next micro-batch, see `collate.collate`; StopIteration after the last epoch, on all ranks at once."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch, from 0, that the latest batch of this rank came from."""

    @abstractmethod
    def places(self) -> list[str]:
        """File and line of each sample of the latest batch."""

    def census(self) -> list[Census] | None:
        """All samples, by source; None: nobody knows before they are read."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position behind the latest batch, of plain types."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position. The next batch is the one that followed it.

        Raises DataError if the position is of other data or other settings: the batches would not be the same.
        """

    @abstractmethod
    def position_of(self, own: dict[str, Any] | None, all_ranks: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
        """The position to go on from on these ranks, whatever the number of ranks that saved.

        Args:
            own: what this rank saved; None if there were another number of them.
            all_ranks: gives what all ranks saved, at the same moment.
        """


def require_same(kind: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuses a position whose `found` settings are not the `expected` ones of this loader."""
    different = [name for name in expected | found if expected.get(name) != found.get(name)]
    if different:
        lines = "".join(f"\n  {name}: saved {found.get(name)!r}, now {expected.get(name)!r}" for name in different)
        raise DataError(
            f"The saved position is of {kind} that differ from those of this loader, so the batches would too:{lines}\n"
            "Use the settings and data that it was saved with, or start at the beginning without it."
        )
