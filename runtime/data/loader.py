"""The interface of loaders, and packing of samples into batches."""

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
"""The source index of a document of padding."""


def join_pair(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Any]:
    """Two documents `(n,)` and `(m,)` as one sample `(n + m,)`, which `make_batch` splits again."""
    lengths = [len(half["input_ids"]) for half in (first, second)]
    return {name: torch.cat([first[name], second[name]]) for name in first} | {"lengths": lengths}


def make_batch(
    samples: Sequence[tuple[int, dict[str, Any]]], *, pad_to: int | None, pad_token_id: int
) -> dict[str, Any]:
    """A micro-batch of samples, each with the index of its source: `collate.collate` of their documents.

    The two documents of a pair follow each other.

    Returns:
        also `document_sources` `(documents,)` int64, PADDING for padding; if samples have a `label`, `document_labels`
        `(documents,)` float64, NaN for padding.
    """
    documents, sources, labels = [], [], []
    for source, sample in samples:
        halves = documents_of(sample)
        documents += halves
        sources += [source] * len(halves)
        labels += [sample["label"]] * len(halves) if "label" in sample else []
    batch = collate(documents, pad_to=pad_to, pad_token_id=pad_token_id)
    num_padding = len(batch["cu_seq_lens_q"]) - 1 - len(documents)
    batch["document_sources"] = torch.tensor([*sources, *[PADDING] * num_padding])
    if labels:
        batch["document_labels"] = torch.tensor([*labels, *[math.nan] * num_padding], dtype=torch.float64)
    return batch


def documents_of(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents of a sample: one, or the two of a pair."""
    fields = {name: value for name, value in sample.items() if name not in ("lengths", "label")}
    if "lengths" not in sample:
        return [fields]
    halves = {name: value.split(sample["lengths"]) for name, value in fields.items()}
    return [{name: parts[half] for name, parts in halves.items()} for half in range(len(sample["lengths"]))]


@dataclass(frozen=True)
class SourceStatistics:
    """All samples of a source: `lengths` `(documents,)` in tokens, and the number of tokens with a loss."""

    lengths: np.ndarray
    learned: int


class Loader(ABC):
    """The unsliced micro-batches of one rank; `parallel.batch.slice_batch` takes the slice of a sequence-parallel rank.

    All ranks have the same number of batches. If samples run out before all ranks have a batch, the ranks without one
    get a batch of padding without labels.

    Attributes:
        counters: samples that were bad, skipped or truncated, by file and line.
        is_sharded: whether `counters` covers only the samples of this batch group; otherwise all samples, on every rank.
    """

    counters: Counters
    is_sharded: bool = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    @abstractmethod
    def __next__(self) -> dict[str, Any]:
        """The next micro-batch, see `collate.collate`; StopIteration after the last epoch, on all ranks."""

    @abstractmethod
    def places(self) -> list[str]:
        """File and line of each sample of the latest batch."""

    def statistics(self) -> list[SourceStatistics] | None:
        """All samples, by source; None: not known before they are read."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position after the latest batch, of plain types."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a position: the next batch is the one that followed it.

        Raises DataError if the position is of other data or settings, which give other batches.
        """

    @abstractmethod
    def position_of(
        self, saved: dict[str, Any] | None, all_ranks: Callable[[], list[dict[str, Any]]]
    ) -> dict[str, Any]:
        """The position to continue from on these ranks, for any number of ranks that saved.

        Args:
            saved: what this rank saved; None if the number of ranks has changed.
            all_ranks: returns what all ranks saved at the same step.
        """


SETTINGS_ADDED_LATER = ("video_fps", "max_frames", "media_root")
"""Settings that older positions lack: whether they changed is unknown, so these do not prevent a run from resuming."""


SHOWN_NAMES = {
    "encodings": "hash of the tokenizer, its template and what else determines the tokens",
    "pool": "data.pool, in tokens",
    "longest": "the most tokens of a sample (data.max_length)",
}
"""Settings that positions save under other names than the recipe's -> how they are shown."""


def require_same(expected: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises DataError unless the `saved` settings of a position are the `expected` ones of this loader."""
    saved = {name: expected[name] for name in SETTINGS_ADDED_LATER if name in expected} | saved
    if not any(saved.get("shuffled", [True])):
        saved["seed"] = None  # older positions have one also where nothing is shuffled
    different = [name for name in expected | saved if expected.get(name) != saved.get(name)]
    if different:
        lines = "".join(
            f"\n  {SHOWN_NAMES.get(name, name)}: saved {saved.get(name)!r}, now {expected.get(name)!r}"
            for name in different
        )
        raise DataError(
            f"The saved position belongs to other samples or settings than this loader has, so batches would differ:{lines}\n"
            "To fix: use the settings and data that it was saved with, or start from the beginning without it."
        )
