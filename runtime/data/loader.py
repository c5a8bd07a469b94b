"""What a trainer takes batches from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from patchgen.runtime.data.problems import Counters, DataError


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
