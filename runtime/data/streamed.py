"""Batches of samples that are read and prepared while training: streams, and multimodal samples.

Each rank reads its own share (`stream.py`), so ranks do not know each other's lengths. With a number of epochs they ask
each other at every batch whether any has one left; those without take part with a batch of padding. Without end they
need not ask.

A position holds the place of an earlier record, and which samples since then still wait: they are read and prepared again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from patchgen.runtime.data.collate import collate
from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.loader import Loader, require_same
from patchgen.runtime.data.packing import Pool
from patchgen.runtime.data.prepare import Prepare, Prepared
from patchgen.runtime.data.problems import Counters, DataError, refuse_bad
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.stream import MixedStream

PLACE_EVERY = 64  # records between two places that a position can start from
MOST_WAITING = 16384  # samples in the pool, whatever their tokens

Entry = tuple[int, int, int, Record]  # number of the record, its epoch, its source, the record
Key = tuple[int, int]  # number of the record, number of the sample in it


class _Workers(Dataset):
    """Prepares the records that the sampler hands it, in worker processes if there are any."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare

    def __getitem__(self, entry: Entry) -> tuple[int, int, Prepared]:
        number, epoch, source, record = entry
        return number, epoch, self.prepare(source, record)


class StreamedLoader(Loader):
    """Batches of prepared samples. A position holds for the same number of ranks, on the rank that it was saved on.

    Args:
        config: how samples become batches.
        stream: the records of this rank.
        prepare: makes samples of them.
        settings: what a saved position must agree with, of plain types.
        pad_token_id: fills padded batches.
        agree: says whether its argument is true on any rank; see `agreement.any_rank`.
    """

    reads_a_share = True

    def __init__(
        self,
        config: DataConfig,
        stream: MixedStream,
        prepare: Prepare,
        *,
        settings: dict[str, Any],
        pad_token_id: int,
        agree: Callable[[bool], bool],
    ) -> None:
        self.counters = Counters()
        self._config = config
        self._stream = stream
        self._prepare = prepare
        self._settings = settings
        self._pad_token_id = pad_token_id
        self._pad_to = config.tokens_per_batch if config.pad_batches else None
        self._agree = agree
        self._start(0, 0, [], None)

    def _start(self, first: int, upto: int, waiting: list[Key], state: dict[str, Any] | None) -> None:
        """Goes on with record `first`, which the stream gives next; of those before `upto` only `waiting` are used."""
        self._pool = Pool(self._config.tokens_per_batch, best_fit=self._config.packing)
        self._samples: dict[Key, dict[str, Any]] = {}
        self._epochs: dict[Key, int] = {}
        self._places = {first: self._stream.state_dict()}
        self._next = first
        self._upto = upto
        self._waiting = set(waiting)
        self._epoch = self._usable_epoch = self._stream.epoch
        self._prepared: Iterator[tuple[int, int, Prepared]] | None = None
        self._first = first
        self._loaded = state

    @property
    def epoch(self) -> int:
        return self._epoch

    def _entries(self) -> Iterator[Entry]:
        """Runs in this process, as far ahead as the workers are fed."""
        for number, (source, record) in enumerate(self._stream, self._first):
            if (number + 1) % PLACE_EVERY == 0:
                self._places[number + 1] = self._stream.state_dict()
            yield number, self._stream.epoch, source, record

    def _refill(self) -> None:
        if self._prepared is None:
            self._loaded = None
            workers = DataLoader(
                _Workers(self._prepare),
                sampler=self._entries(),
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=self._config.num_workers,
                worker_init_fn=_one_thread,
            )
            self._prepared = iter(workers)
        while self._next < self._upto or (
            self._pool.tokens < self._config.pool_tokens and len(self._pool) < MOST_WAITING
        ):
            entry = next(self._prepared, None)
            if entry is None:
                return
            self._take_in(*entry)

    def _take_in(self, number: int, epoch: int, prepared: Prepared) -> None:
        self._next = number + 1
        again = number < self._upto
        if prepared.problem is not None and not again:
            outcome, where, reason = prepared.problem
            if outcome == "bad" and self._config.on_bad == "error":
                raise refuse_bad(where, reason)
            self.counters.add(outcome, where, reason)
        if epoch > self._usable_epoch + 1:
            raise DataError(f"No usable sample for this rank in a whole epoch: {self.counters.summary()}.")
        if prepared.samples:
            self._usable_epoch = epoch
        for piece, sample in enumerate(prepared.samples):
            key = (number, piece)
            if not again or key in self._waiting:
                self._samples[key] = sample
                self._epochs[key] = epoch
                self._pool.add(key, sample["input_ids"].shape[-1])

    def __next__(self) -> dict[str, Any]:
        self._refill()
        mine = len(self._pool) > 0
        if not mine and not (self._config.epochs is not None and self._agree(False)):
            raise StopIteration
        if mine and self._config.epochs is not None:
            self._agree(True)
        keys = self._pool.take() if mine else []
        samples = [self._samples.pop(key) for key in keys]
        if keys:
            self._epoch = self._epochs[keys[0]]
        for key in keys:
            del self._epochs[key]
        self._forget_places()
        return collate(samples, pad_to=self._pad_to, pad_token_id=self._pad_token_id)

    def _forget_places(self) -> None:
        """Only the latest place before all that waits is needed."""
        oldest = self._oldest()
        usable = [number for number in self._places if number <= oldest]
        for number in usable[:-1]:
            del self._places[number]

    def _oldest(self) -> int:
        """The first record that has to be read again on resuming."""
        return min([self._next, *(number for number, _ in self._pool)])

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        place = max(number for number in self._places if number <= self._oldest())
        return {
            "settings": self._settings,
            "stream": self._places[place],
            "first": place,
            "upto": self._next,
            "waiting": [list(key) for key in self._pool],
            "counters": self.counters.as_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_same("samples, settings or ranks", self._settings, state["settings"])
        self._stream.load_state_dict(state["stream"])
        # Positions that were saved without counters count from here on.
        self.counters = Counters.from_dict(state.get("counters", Counters().as_dict()))
        self._start(state["first"], state["upto"], [tuple(key) for key in state["waiting"]], state)


def _as_it_is(sample: Any) -> Any:
    return sample


def _one_thread(worker: int) -> None:
    """Tokenizers do not start threads in a worker: they cannot after a fork, and warn of it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
