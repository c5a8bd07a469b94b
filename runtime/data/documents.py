"""The samples of one token cache: its documents, those that are too long left out, cut or split."""

from __future__ import annotations

import numpy as np
import torch

from patchgen.runtime.data.cache import TokenCache
from patchgen.runtime.data.collate import text_sample
from patchgen.runtime.data.config import OnLong
from patchgen.runtime.data.problems import REMEMBERED, Counters, refuse_long, too_long


class Documents:
    """Samples that are at most `limit` tokens long.

    Attributes:
        starts: `(samples,)` int64, where each begins in the cache's tokens.
        lengths: `(samples,)` int32.
        counters: what was bad when the cache was made, and what is too long.
    """

    def __init__(self, cache: TokenCache, *, limit: int, on_long: OnLong) -> None:
        self.cache = cache
        self.counters = Counters()
        self.counters.merge(cache.counters)
        self.starts = np.asarray(cache.bounds[:-1])
        self.lengths = np.diff(cache.bounds).astype(np.int32)
        long = np.flatnonzero(self.lengths > limit)
        if not len(long):
            return
        if on_long == "error":
            raise refuse_long(cache.places.of(long[:1])[0], int(self.lengths[long[0]]), limit)
        if on_long == "split":
            self._split(limit)
            return
        reasons = [too_long(int(length), limit) for length in self.lengths[long[:REMEMBERED]]]
        places = zip(cache.places.of(long[:REMEMBERED]), reasons, strict=True)
        if on_long == "skip":
            self.counters.add_many("skipped", len(long), places)
            self.starts, self.lengths = np.delete(self.starts, long), np.delete(self.lengths, long)
        else:
            self.counters.add_many("truncated", len(long), places)
            self.lengths = np.minimum(self.lengths, limit)

    def _split(self, limit: int) -> None:
        """Each document becomes pieces of `limit` tokens and a rest."""
        pieces = -(-self.lengths // limit)
        document = np.repeat(np.arange(len(pieces)), pieces)
        offset = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * limit
        self.lengths = np.minimum(self.lengths[document] - offset, limit).astype(np.int32)
        self.starts = self.starts[document] + offset

    def sample(self, number: int) -> dict[str, torch.Tensor]:
        """The sample `number` as `collate.text_sample` makes it."""
        start = int(self.starts[number])
        window = slice(start, start + int(self.lengths[number]))
        ids = torch.from_numpy(self.cache.tokens[window].astype(np.int64))
        targets = self.cache.targets
        return text_sample(ids, None if targets is None else torch.from_numpy(np.array(targets[window])))
