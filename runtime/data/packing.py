"""Which samples share a batch.

Samples wait in a pool. Every batch begins with the sample that has waited longest, so none waits for ever, and is filled
up with the longest waiting sample that still fits, again and again, until none does: long samples go first, short ones
close the gaps. With a pool of many batches hardly a token of the budget stays empty (`benchmarks/bench_data.py`).

    budget 10, waiting (oldest first)  4 7 3 2 9 1      ->  4 3 2 1   then 7   then 9
    in order (packing off)             4 7 3 2 9 1      ->  4   then 7 3   then 2   then 9 1
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator


class Pool:
    """Samples that wait for a batch, each a key and its length in tokens.

    Args:
        budget: the most tokens of a batch.
        best_fit: as above; False: batches are filled in order of arrival.
    """

    def __init__(self, budget: int, *, best_fit: bool = True) -> None:
        self.budget = budget
        self.best_fit = best_fit
        self.tokens = 0
        self._waiting: dict[Hashable, tuple[int, int]] = {}  # key -> (length, -arrival), oldest first
        self._by_length: list[tuple[int, int, Hashable]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Hashable]:
        """The keys that wait, oldest first."""
        return iter(self._waiting)

    def clear(self) -> None:
        self._waiting.clear()
        self._by_length.clear()
        self.tokens = 0

    def add(self, key: Hashable, length: int) -> None:
        """Raises ValueError for a length that no batch holds or a key that waits already."""
        if not 0 < length <= self.budget:
            raise ValueError(f"Sample {key} has {length} tokens; a batch holds 1 to {self.budget}.")
        if key in self._waiting:
            raise ValueError(f"Sample {key} is in the pool already.")
        self._waiting[key] = (length, -self._arrivals)
        if self.best_fit:
            insort(self._by_length, (length, -self._arrivals, key))
        self._arrivals += 1
        self.tokens += length

    def take(self) -> list[Hashable]:
        """Removes the samples of the next batch from the pool; the pool must not be empty."""
        batch = [next(iter(self._waiting))]
        room = self.budget - self._remove(batch[0])
        while self._waiting:
            if self.best_fit:
                position = bisect_left(self._by_length, (room + 1,)) - 1
                if position < 0:
                    break
                key = self._by_length[position][2]
            else:
                key = next(iter(self._waiting))
                if self._waiting[key][0] > room:
                    break
            room -= self._remove(key)
            batch.append(key)
        return batch

    def _remove(self, key: Hashable) -> int:
        length, arrival = self._waiting.pop(key)
        if self.best_fit:
            del self._by_length[bisect_left(self._by_length, (length, arrival))]
        self.tokens -= length
        return length
