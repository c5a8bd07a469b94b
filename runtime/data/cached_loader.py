"""Batches of samples with cached tokens: all lengths are known, so all ranks follow one plan (`batch_plan.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from patchgen.runtime.data.batch_plan import BatchPlan
from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.documents import Documents
from patchgen.runtime.data.loader import Loader, SourceStatistics, make_batch, require_same
from patchgen.runtime.data.packing import Pool
from patchgen.runtime.data.problems import Counters, DataError


class PlannedLoader(Loader):
    """Batches of cached samples. A position is valid for any number of ranks.

    Args:
        sources: in the order of `config.sources`.
        pad_token_id: fills padded batches.
        batch_index, num_batches: this rank takes batch `batch_index` of every `num_batches`.
    """

    def __init__(
        self,
        config: DataConfig,
        sources: Sequence[Documents],
        *,
        pad_token_id: int,
        batch_index: int,
        num_batches: int,
    ) -> None:
        self.counters = Counters()
        for source, source_config in zip(sources, config.sources, strict=True):
            self.counters.merge(source.counters)
            if not len(source.lengths):
                raise DataError(f"No sample of {source_config.path} is left: {source.counters.summary()}.")
        self._sources = sources
        self._latest: list[tuple[int, int]] = []
        self._pad_token_id = pad_token_id
        self._pad_to = config.tokens_per_batch if config.pad_batches else None
        self._batch_index = batch_index
        self._num_batches = num_batches
        weights = [source.weight for source in config.sources]
        self._plan = BatchPlan(
            [source.lengths for source in sources],
            [weight for weight in weights if weight is not None] or None,  # all have one, or none has
            seed=config.seed if config.shuffle else None,
            epochs=config.epochs,
            pool=Pool(config.tokens_per_batch, best_fit=config.packing),
            pool_tokens=config.pool_tokens,
        )
        self._settings = {
            "sources": [source.cache.content_hash for source in sources],
            "weights": weights,
            "seed": config.seed if config.shuffle else None,
            "tokens_per_batch": config.tokens_per_batch,
            "packing": config.packing,
            "pool": config.pool_tokens,
            "longest": config.length_limit,
            "on_long": config.on_long,
        }

    def __next__(self) -> dict[str, Any]:
        batches = [self._plan.next() for _ in range(self._num_batches)]
        if batches[0] is None:
            raise StopIteration
        self._latest = batches[self._batch_index] or []
        samples = [(source, self._sources[source].sample(index)) for source, index in self._latest]
        return make_batch(samples, pad_to=self._pad_to, pad_token_id=self._pad_token_id)

    def places(self) -> list[str]:
        return [self._sources[source].place(index) for source, index in self._latest]

    def statistics(self) -> list[SourceStatistics]:
        return [SourceStatistics(source.doc_lengths.ravel(), source.num_learned()) for source in self._sources]

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self._settings, "plan": self._plan.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_same(self._settings, state["settings"])
        self._plan.load_state_dict(state["plan"])

    def position_of(
        self, saved: dict[str, Any] | None, all_ranks: Callable[[], list[dict[str, Any]]]
    ) -> dict[str, Any]:
        return saved if saved is not None else all_ranks()[0]  # the plan is the same on all ranks
