"""Which samples are in every batch of every rank, known before any sample is read.

All ranks make the same plan: a sequence of batches, of which rank b of n takes every n-th. So each sample is in one
batch of one rank, all ranks have the same number of batches, and a plan can be resumed with any other n:

    plan    0 1 2 3 4 5 6 7 8       rank 0 of 2:  0 2 4 6 8     then, resumed after two rounds   rank 0 of 3:  4 7
                                    rank 1 of 2:  1 3 5 7 -                                      rank 1 of 3:  5 8
    -  an empty batch fills the last round of the last epoch                                     rank 2 of 3:  6 -
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from patchgen.runtime.data.order import MixedOrder
from patchgen.runtime.data.packing import Pool

MAX_WAITING = 16384  # most samples in the pool, however few tokens they have


class BatchPlan:
    """The batches of all ranks, in order; each a list of `(source, index of the sample in it)`.

    Args:
        lengths: the tokens of each sample, by source.
        weights: by source; None: proportional to size.
        seed: None keeps the order of each source.
        epochs: None: endless.
        pool: samples that wait for a batch; refilled up to `pool_tokens`.
    """

    def __init__(
        self,
        lengths: Sequence[np.ndarray],
        weights: Sequence[float] | None,
        *,
        seed: int | None,
        epochs: int | None,
        pool: Pool[tuple[int, int]],
        pool_tokens: int,
    ) -> None:
        self._lengths = lengths
        self._weights = weights
        self._seed = seed
        self._epochs = epochs
        self._pool = pool
        self._pool_tokens = pool_tokens
        self.epoch = 0
        self._begin_epoch(0, [0] * len(lengths))

    def _begin_epoch(self, epoch: int, counts: list[int]) -> None:
        self.epoch = epoch
        self._counts = counts
        sizes = [len(lengths) for lengths in self._lengths]
        self._order = MixedOrder(sizes, self._weights, seed=self._seed, epoch=epoch)
        self._upcoming: Iterator[tuple[int, int, int]] = self._order.after(counts)
        self._indices: dict[tuple[int, int], int] = {}  # (source, k), as in `MixedOrder.after` -> index in the source

    def next(self) -> list[tuple[int, int]] | None:
        """The samples of the next batch; None after the last epoch."""
        self._refill()
        if not self._pool:
            if self._epochs is not None and self.epoch + 1 >= self._epochs:
                return None
            self._begin_epoch(self.epoch + 1, [0] * len(self._lengths))
            self._refill()
        return [(key[0], self._indices.pop(key)) for key in self._pool.take()]

    def _refill(self) -> None:
        while self._pool.tokens < self._pool_tokens and len(self._pool) < MAX_WAITING:
            entry = next(self._upcoming, None)
            if entry is None:
                return
            source, k, index = entry
            self._counts[source] += 1
            self._add_to_pool(source, k, index)

    def _add_to_pool(self, source: int, k: int, index: int) -> None:
        self._indices[source, k] = index
        self._pool.add((source, k), int(self._lengths[source][index]))

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, how many samples of each source it has used, and which of these still wait in the pool."""
        return {"epoch": self.epoch, "counts": list(self._counts), "waiting": [list(entry) for entry in self._pool]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pool.clear()
        self._begin_epoch(state["epoch"], list(state["counts"]))
        for source, k in state["waiting"]:
            self._add_to_pool(source, k, int(self._order.indices(source, np.array([k]))[0]))
