"""The samples of one token cache: its documents, with long ones skipped, truncated or split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from patchgen.runtime.data.cache import TokenCache
from patchgen.runtime.data.collate import text_sample
from patchgen.runtime.data.config import OnLong
from patchgen.runtime.data.loader import join_pair
from patchgen.runtime.data.prepare import reason_of_outcome, refusal_of_long_sample
from patchgen.runtime.data.problems import MAX_PLACES, Counters, Outcome


class Documents:
    """Samples of one document, or of the two of a pair, each of at most `limit` tokens.

    Args:
        skip_cut_targets: skip samples that would lose a target by truncation.

    Attributes:
        starts: `(samples, documents per sample)` int64, offsets in the cache's tokens.
        doc_lengths: `(samples, documents per sample)` int32, tokens of each document.
        lengths: `(samples,)` int32, tokens of each sample.
        indices: by sample, the index in the cache of its document or pair; the pieces of a split document share one.
        counters: samples that were bad when the cache was written, and that are too long.
    """

    def __init__(self, cache: TokenCache, *, limit: int, on_long: OnLong, skip_cut_targets: bool = False) -> None:
        self.cache = cache
        self.skip_cut_targets = skip_cut_targets
        self.counters = Counters()
        self.counters.merge(cache.counters)
        first, lengths = np.asarray(cache.bounds[:-1]), np.diff(cache.bounds)
        self.starts, self.doc_lengths = first[:, None], lengths.astype(np.int32)[:, None]  # starts stay mapped
        if cache.splits is not None:
            self.starts = np.stack([first, first + cache.splits], axis=1)
            self.doc_lengths = np.stack([cache.splits, lengths - cache.splits], axis=1).astype(np.int32)
        self.indices: Sequence[int] | np.ndarray = range(len(lengths))
        self._apply_limit(limit, on_long)
        self.lengths = self.doc_lengths.sum(axis=1, dtype=np.int32)

    def _apply_limit(self, limit: int, on_long: OnLong) -> None:
        longest, is_pair = self.doc_lengths.max(axis=1), self.cache.splits is not None
        long = np.flatnonzero(longest > limit)
        if not len(long):
            return
        if on_long == "error":
            is_plain_text = self.cache.targets is None and self.cache.labels is None and not is_pair
            where, length = self.cache.places(long[:1])[0], int(longest[long[0]])
            raise refusal_of_long_sample(where, length, limit, can_split=is_plain_text, is_pair=is_pair)
        if on_long == "split":
            self._split(limit)
            return
        is_truncated = [on_long == "truncate" and self._is_usable(int(index), limit) for index in long]
        documents_by_outcome: dict[Outcome, np.ndarray] = {
            "truncated": long[is_truncated],
            "skipped": long[np.logical_not(is_truncated)],
        }
        for outcome, documents in documents_by_outcome.items():
            first = documents[:MAX_PLACES]
            reasons = [
                reason_of_outcome(
                    int(longest[index]),
                    limit,
                    truncates=on_long == "truncate",
                    outcome=outcome,
                    skip_cut_targets=self.skip_cut_targets,
                    is_pair=is_pair,
                )
                for index in first
            ]
            if len(documents):
                self.counters.add_many(outcome, len(documents), zip(self.cache.places(first), reasons, strict=True))
        self.indices = np.delete(np.arange(len(self.doc_lengths)), long[np.logical_not(is_truncated)])
        self.starts, self.doc_lengths = self.starts[self.indices], np.minimum(self.doc_lengths[self.indices], limit)

    def _is_usable(self, index: int, limit: int) -> bool:
        """Whether each document of a sample has a loss among its first `limit` tokens, the first of which is not predicted;
        with `skip_cut_targets`, also none after them."""
        targets = self.cache.targets
        if targets is None:
            return not self.skip_cut_targets
        documents = list(zip(self.starts[index], self.doc_lengths[index], strict=True))
        if self.skip_cut_targets and any(targets[start + limit : start + length].any() for start, length in documents):
            return False
        return all(bool(targets[start + 1 : start + min(length, limit)].any()) for start, length in documents)

    def _split(self, limit: int) -> None:
        """Splits each document into pieces of `limit` tokens and a shorter last one; pairs are never split."""
        lengths = self.doc_lengths[:, 0]
        pieces = -(-lengths // limit)
        self.indices = document = np.repeat(np.arange(len(pieces)), pieces)
        offset = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * limit
        self.doc_lengths = np.minimum(lengths[document] - offset, limit).astype(np.int32)[:, None]
        self.starts = self.starts[document] + offset[:, None]

    def sample(self, index: int) -> dict[str, Any]:
        """The sample `index` for `loader.make_batch`."""
        documents = [self._document(*part) for part in zip(self.starts[index], self.doc_lengths[index], strict=True)]
        sample: dict[str, Any] = documents[0] if len(documents) == 1 else join_pair(*documents)
        if self.cache.labels is not None:
            sample["label"] = float(self.cache.labels[self.indices[index]])
        return sample

    def place(self, index: int) -> str:
        """File and line of the sample `index`."""
        return self.cache.places([int(self.indices[index])])[0]

    def num_learned(self) -> int:
        """The number of tokens with a loss, without the first of each document, which is not predicted."""
        targets = self.cache.targets
        if targets is None:
            return int(self.doc_lengths.sum(dtype=np.int64)) - self.doc_lengths.size
        targets = targets if targets.dtype == bool else targets != 0
        has_predicted = self.doc_lengths.ravel() > 1
        starts = self.starts.ravel()[has_predicted] + 1
        bounds = np.stack([starts, starts + self.doc_lengths.ravel()[has_predicted] - 1], axis=1).ravel()
        bounds = bounds[: len(bounds) - (bounds[-1:] == len(targets)).sum()]  # the last sum extends to the end
        return int(np.add.reduceat(targets, bounds, dtype=np.int64)[::2].sum()) if len(bounds) else 0

    def _document(self, start: int, length: int) -> dict[str, torch.Tensor]:
        window = slice(int(start), int(start) + int(length))
        ids = torch.from_numpy(self.cache.tokens[window].astype(np.int64))
        targets = self.cache.targets
        return text_sample(ids, None if targets is None else torch.from_numpy(np.array(targets[window])))
