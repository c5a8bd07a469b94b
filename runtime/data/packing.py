"""Which samples share a row; a batch is one row.

Samples wait in a pool. Every row begins with the oldest sample, so none waits forever, and is filled repeatedly with
the longest sample that still fits: long samples go first, short ones fill the gaps. With a pool of many rows there is
hardly any padding (`benchmarks/bench_data.py`).

    budget 10, waiting (oldest first)  4 7 3 2 9 1      ->  4 3 2 1   then 7   then 9
    in order (packing off)             4 7 3 2 9 1      ->  4   then 7 3   then 2   then 9 1

Samples with modalities that the model cannot distinguish in one row are not packed together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Pool(Generic[Key]):
    """Samples that wait for a row, each a key and its length in tokens.

    Args:
        budget: the most tokens of a row.
        best_fit: as above; False: rows are filled in order of arrival.
        separate: pairs of modalities that no row combines.
    """

    def __init__(self, budget: int, *, best_fit: bool = True, separate: Collection[tuple[str, str]] = ()) -> None:
        self.budget = budget
        self.best_fit = best_fit
        self._separate = [frozenset(pair) for pair in separate]
        self._modalities: dict[Key, frozenset[str]] = {}  # of samples with media
        self.tokens = 0
        self._waiting: dict[Key, tuple[int, int]] = {}  # key -> (length, -arrival), oldest first
        self._by_length: list[tuple[int, int, Key]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Key]:
        """The waiting keys, oldest first."""
        return iter(self._waiting)

    def clear(self) -> None:
        self._waiting.clear()
        self._modalities.clear()
        self._by_length.clear()
        self.tokens = 0

    def add(self, key: Key, length: int, modalities: frozenset[str] = frozenset()) -> None:
        """Adds a sample. Raises ValueError for a length outside of the budget or a key that is already waiting."""
        if not 0 < length <= self.budget:
            raise ValueError(f"Sample {key} has {length} tokens; expected 1 to {self.budget}.")
        if key in self._waiting:
            raise ValueError(f"Sample {key} is in the pool already.")
        self._waiting[key] = (length, -self._arrivals)
        if modalities:
            self._modalities[key] = modalities
        if self.best_fit:
            insort(self._by_length, (length, -self._arrivals, key))
        self._arrivals += 1
        self.tokens += length

    def take(self) -> list[Key]:
        """Removes the samples of the next row from the pool; the pool must not be empty."""
        row = [next(iter(self._waiting))]
        modalities = set(self._modalities.get(row[0], ()))
        room = self.budget - self._remove(row[0])
        while (key := self._next(room, modalities)) is not None:
            modalities |= self._modalities.get(key, frozenset())
            room -= self._remove(key)
            row.append(key)
        return row

    def _next(self, room: int, modalities: set[str]) -> Key | None:
        """The next sample for a row with `room` tokens left and these modalities; None if none fits."""
        if not self.best_fit:
            key = next(iter(self._waiting), None)
            fits = key is not None and self._waiting[key][0] <= room and self._is_compatible(key, modalities)
            return key if fits else None
        position = bisect_left(self._by_length, (room + 1,)) - 1
        while position >= 0 and not self._is_compatible(self._by_length[position][2], modalities):
            position -= 1
        return self._by_length[position][2] if position >= 0 else None

    def _is_compatible(self, key: Key, modalities: set[str]) -> bool:
        combined = modalities | self._modalities.get(key, frozenset())
        return not any(pair <= combined for pair in self._separate)

    def _remove(self, key: Key) -> int:
        length, negated_arrival = self._waiting.pop(key)
        self._modalities.pop(key, None)
        if self.best_fit:
            del self._by_length[bisect_left(self._by_length, (length, negated_arrival))]
        self.tokens -= length
        return length
