"""The order of samples: shuffled within each source, the sources mixed by weight.

Sample k of a source with weight w comes at time (k + 1/2) / w, so that at any time t each source has given w * t samples
to within one half, and after n samples its share of n to within (S + 1) / 2 for S sources. An epoch ends when every source has
been read once. Without weights, sources are weighted by size, so each sample occurs once; with weights, a source that ends
before the others starts again in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

BLOCK = 4096
"""Samples per source that are sorted at a time."""


class MixedOrder:
    """The order of one epoch.

    Args:
        sizes: samples of each source, all above 0.
        weights: by source; None: proportional to size.
        seed: None keeps the order of each source.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None, *, seed: int | None, epoch: int) -> None:
        self.sizes = list(sizes)
        self.weights = np.array(weights if weights is not None else sizes, dtype=np.float64)
        self.seed = seed
        self.epoch = epoch
        end = max(size / weight for size, weight in zip(self.sizes, self.weights, strict=True))
        # Samples of each source in the epoch: those whose time is before its end.
        self.totals = [
            size if weights is None else max(size, int(np.ceil(end * weight - 0.5)))
            for size, weight in zip(self.sizes, self.weights, strict=True)
        ]

    def after(self, counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """The samples after the first `counts` of each source: `(source, k, index in the source)`.

        k counts the samples of the source in the epoch.
        """
        counts = list(counts)
        while any(count < total for count, total in zip(counts, self.totals, strict=True)):
            ks = [
                np.arange(count, min(count + BLOCK, total)) for count, total in zip(counts, self.totals, strict=True)
            ]
            times = np.concatenate([(k + 0.5) / weight for k, weight in zip(ks, self.weights, strict=True)])
            sources = np.repeat(np.arange(len(ks)), [len(k) for k in ks])
            indices = np.concatenate([self.indices(source, k) for source, k in enumerate(ks)])
            # Later entries are uncertain: the next block of a source may hold an earlier time.
            first = np.argsort(times, kind="stable")[:BLOCK]
            num_taken = np.bincount(sources[first], minlength=len(ks)).tolist()
            counts = [count + more for count, more in zip(counts, num_taken, strict=True)]
            yield from zip(
                sources[first].tolist(), np.concatenate(ks)[first].tolist(), indices[first].tolist(), strict=True
            )

    def indices(self, source: int, k: np.ndarray) -> np.ndarray:
        """The indices in the source of its k-th samples, for ascending `k` `(n,)`."""
        size = self.sizes[source]
        if self.seed is None:
            return k % size
        shuffled = [
            permutation(size, self.seed, self.epoch, source, lap)[k[k // size == lap] % size]
            for lap in np.unique(k // size).tolist()
        ]
        return np.concatenate(shuffled) if shuffled else k


@lru_cache(maxsize=8)
def permutation(size: int, seed: int, epoch: int, source: int, lap: int) -> np.ndarray:
    """The shuffled indices of a source in one `lap`: its n-th pass over its samples within the epoch."""
    dtype = np.uint32 if size < 2**32 else np.uint64
    return np.random.default_rng([seed, epoch, source, lap]).permutation(np.arange(size, dtype=dtype))
