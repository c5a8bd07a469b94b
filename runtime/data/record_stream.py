"""A stream of records of several sources, mixed by weight, of which each rank takes its share.

Every rank iterates over the same records, numbered across epochs, and takes every n-th:

    mixed     a0 b0 a1 a2 b1 a3 a4 ...      rank 0 of 2: a0 a1 b1 a4      rank 1 of 2: b0 a2 a3

Sample k of a source with weight w comes at time (k + 1/2) / w. With `repeat`, a source that ends
starts again; the epoch ends when each source has ended once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from patchgen.runtime.data.order import permutation
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.records import Record, Source


@dataclass(frozen=True)
class Share:
    """The records of one rank, by number: from `since` on those with `number % count == index`, before that those of
    `leftover`.

    Records are left over if a run with another number of ranks was resumed, whose ranks had advanced differently.
    """

    index: int
    count: int
    since: int = 0
    leftover: frozenset[int] = frozenset()

    def includes(self, number: int) -> bool:
        """Whether the record of this number belongs to the share."""
        return number % self.count == self.index if number >= self.since else number in self.leftover


@dataclass
class Cursor:
    """The state of a source in the epoch: `count` records were read, in `lap` full passes and the current one. `position` is the
    index of the next sample, or one of `Source.read`."""

    count: int = 0
    lap: int = 0
    position: Any = None
    ended: bool = False


class MixedStream:
    """The records of one rank, over all epochs.

    Args:
        weights: by source.
        repeat: a source that ends before the others starts again.
        shuffled: by source, whether it is read in a new random order each lap; otherwise in its own order.
        epochs: None: endless.
        share: of this rank.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        *,
        repeat: bool,
        seed: int,
        shuffled: Sequence[bool],
        epochs: int | None,
        share: Share,
    ) -> None:
        self._sources = sources
        self._repeat = repeat
        self.weights = weights
        self._seed = seed
        self.shuffled = shuffled
        self._epochs = epochs
        self.share = share
        self.epoch = 0
        self._num_records = 0
        self._cursors = [Cursor() for _ in sources]
        self._readers: list[Iterator[tuple[Record, Any]] | None] = [None] * len(sources)

    def __iter__(self) -> Iterator[tuple[int, int, Record]]:
        """`(record number, index of its source, record)`, this rank's share."""
        while self._epochs is None or self.epoch < self._epochs:
            while (source := self._next_source()) is not None:
                number = self._num_records
                exists, record = self._advance(source, needed=self.share.includes(number))
                self._num_records += exists
                if record is not None:
                    yield number, source, record
            self.epoch += 1
            self._cursors = [Cursor() for _ in self._sources]
            self._readers = [None] * len(self._sources)

    def _next_source(self) -> int | None:
        """The index of the source whose sample is next; None at the end of the epoch."""
        if all(cursor.ended for cursor in self._cursors):
            return None
        due = [
            ((cursor.count + 0.5) / self.weights[number], number)
            for number, cursor in enumerate(self._cursors)
            if self._repeat or not cursor.ended
        ]
        return min(due)[1]

    def _advance(self, index: int, *, needed: bool) -> tuple[bool, Record | None]:
        """Whether the source had another record, and that record if `needed`."""
        cursor, source = self._cursors[index], self._sources[index]
        record = None
        if self.shuffled[index]:
            k, indexed = cursor.position or 0, cast(Any, source)  # streams are not shuffled
            exists = k < len(indexed)
            if exists and needed:
                record = indexed[int(permutation(len(indexed), self._seed, self.epoch, index, cursor.lap)[k])]
            cursor.position = k + 1
        else:
            reader = self._readers[index]
            if reader is None:
                reader = self._readers[index] = source.read(cursor.position)
            record, cursor.position = next(reader, (None, None))
            exists = record is not None
        if not exists:
            if cursor.count == 0:
                raise DataError(f"No samples in {source.name}.")
            cursor.ended, cursor.lap, cursor.position = True, cursor.lap + 1, None
            self._readers[index] = None
            return False, None
        cursor.count += 1
        return True, record if needed else None

    def state_dict(self) -> dict[str, Any]:
        """The position after the latest record; JSON types."""
        cursors = [[cursor.count, cursor.lap, cursor.position, cursor.ended] for cursor in self._cursors]
        return {"epoch": self.epoch, "taken": self._num_records, "cursors": cursors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self._num_records = state["taken"]
        self._cursors = [Cursor(*values) for values in state["cursors"]]
        self._readers = [None] * len(self._sources)
