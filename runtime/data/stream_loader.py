"""Batches of samples that are read and prepared while training: streams, and multimodal samples.

Each rank reads its share (`record_stream.py`), so ranks do not know each other's lengths. With a limited number of epochs
they agree at every batch whether any rank has one left; a rank that has none gets a batch of padding. Endless streams need no
agreement.

A position contains the stream's position at an earlier record, and which samples since then still wait: these are read and
prepared again. The positions of all ranks determine which records are left over, so any number of ranks can share them:

    2 ranks   rank 0 has used  0 2 4         waits: 6     next: 8        leftover: 3 and 6, which wait; 5 and 7, which
              rank 1 has used  1             waits: 3     next: 5        rank 1 has not read; and all from 8 on
    3 ranks   3 5 6 7 in turn:   3 7 | 5 | 6     then from 8 on every third
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset

from patchgen.runtime import registry
from patchgen.runtime.data.agreement import BATCH, FAILURE, NO_BATCH
from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.loader import Loader, make_batch, require_same
from patchgen.runtime.data.packing import Pool
from patchgen.runtime.data.prepare import PreparedRecord, Preparer
from patchgen.runtime.data.problems import Counters, DataError, FailedOnAnotherRank, bad_sample_error
from patchgen.runtime.data.record_stream import MixedStream, Share
from patchgen.runtime.data.records import Record
from patchgen.runtime.parallel import batch_fields

POSITION_EVERY = 64  # records between two stream positions that are kept for resuming
POSITION_FORMAT = 2  # version of saved positions; in 2, records are numbered across ranks
MAX_WAITING = 16384  # most samples in the pool, however few tokens they have

Entry = tuple[int, int, int, Record]  # record number, its epoch, its source, the record
Key = tuple[int, int]  # record number, index of the sample in the record


class Origin(NamedTuple):
    """Where a record came from."""

    epoch: int
    source: int
    where: str


class _PreparedRecords(Dataset):
    """Prepares the records that the sampler yields, in worker processes if there are any."""

    def __init__(self, prepare: Preparer) -> None:
        self.prepare = prepare

    def __reduce__(self) -> tuple:
        # A spawned worker has to register the folders of the user's classes and the rules of their inputs first: pickle
        # makes this call before it reads the state.
        arguments = registry.local_packages(), batch_fields.declared_rules()
        return _rebuild_in_worker, arguments, {"prepare": self.prepare}

    def __getitem__(self, entry: Entry) -> tuple[int, Origin, PreparedRecord]:
        number, epoch, source, record = entry
        return number, Origin(epoch, source, record.where), self.prepare(source, record)


class StreamedLoader(Loader):
    """Batches of prepared samples. A position is valid on the rank that saved it; `position_of` converts the positions of
    another number of ranks.

    Args:
        stream: the records of this rank.
        prepare: turns a record into samples.
        settings: what a saved position must match, of plain types.
        pad_token_id: fills padded batches.
        agree: the maximum over ranks; see `agreement.max_over_ranks`.
    """

    is_sharded = True

    def __init__(
        self,
        config: DataConfig,
        stream: MixedStream,
        prepare: Preparer,
        *,
        settings: dict[str, Any],
        pad_token_id: int,
        agree: Callable[[int], int],
    ) -> None:
        self.counters = Counters()
        self._config = config
        self._stream = stream
        self._prepare = prepare
        self._settings = settings | {"positions": POSITION_FORMAT}
        self._pad_token_id = pad_token_id
        self._pad_to = config.tokens_per_batch if config.pad_batches else None
        self._agree = agree
        self._start(0, stream.share, [], None)

    def _start(self, first: int, share: Share, waiting: Sequence[Key], state: dict[str, Any] | None) -> None:
        """Continues with record `first`, the next one of the stream.

        Args:
            share: the records of the stream to use, including those of `waiting`.
            waiting: samples that were waiting; the other samples of their records were already used.
            state: the position that was loaded, which `state_dict` returns until a batch is read; None: none was.
        """
        self._pool: Pool[Key] = Pool(
            self._config.tokens_per_batch,
            best_fit=self._config.packing,
            separate=self._config.separate_modalities or (),
        )
        self._samples: dict[Key, dict[str, Any]] = {}
        self._origins: dict[Key, Origin] = {}
        self._latest: list[Origin] = []
        self._stream_positions = {first: self._stream.state_dict()}
        self._stream.share = share
        self._next = first
        self._waiting_when_saved: dict[int, set[int]] = {}
        for number, piece in waiting:
            self._waiting_when_saved.setdefault(number, set()).add(piece)
        self._reread_until = max(self._waiting_when_saved, default=first - 1) + 1
        self._last_usable_epoch: int | None = None
        self._prepared: Iterator[tuple[int, Origin, PreparedRecord]] | None = None
        self._loaded = state

    def _entries(self) -> Iterator[Entry]:
        """The records of this rank; read in this process, ahead of the workers."""
        for count, (number, source, record) in enumerate(self._stream, 1):
            if count % POSITION_EVERY == 0:
                self._stream_positions[number + 1] = self._stream.state_dict()
            yield number, self._stream.epoch, source, record

    def _refill(self) -> None:
        if self._prepared is None:
            self._loaded = None
            loader = DataLoader(
                _PreparedRecords(self._prepare),
                sampler=self._entries(),
                batch_size=None,
                collate_fn=_identity,
                num_workers=self._config.num_workers,
                worker_init_fn=_one_thread,
            )
            self._prepared = iter(loader)
        while self._next < self._reread_until or (
            self._pool.tokens < self._config.pool_tokens and len(self._pool) < MAX_WAITING
        ):
            entry = next(self._prepared, None)
            if entry is None:
                return
            self._add_prepared(*entry)

    def _add_prepared(self, number: int, origin: Origin, prepared: PreparedRecord) -> None:
        self._next = number + 1
        waiting = self._waiting_when_saved.pop(number, None)  # None: not read before
        if prepared.problem is not None and waiting is None:
            outcome, where, reason = prepared.problem
            if outcome == "bad" and self._config.on_bad == "error":
                raise bad_sample_error(where, reason)
            self.counters.add(outcome, where, reason)
        self._require_usable(number, origin.epoch, prepared)
        for piece, sample in enumerate(prepared.samples):
            key = (number, piece)
            if waiting is None or piece in waiting:
                self._samples[key] = sample
                self._origins[key] = origin
                self._pool.add(key, sample["input_ids"].shape[-1], prepared.modalities)

    def _require_usable(self, number: int, epoch: int, prepared: PreparedRecord) -> None:
        """Raises if none of this rank's samples was usable in a full epoch, instead of searching endlessly."""
        if number < self._stream.share.since:  # leftover records are not a full epoch
            return
        if self._last_usable_epoch is None or prepared.samples:
            self._last_usable_epoch = epoch
        elif epoch > self._last_usable_epoch + 1:
            raise DataError(f"No usable sample for this rank in a full epoch: {self.counters.summary()}.")

    def __next__(self) -> dict[str, Any]:
        failure = None
        try:
            self._refill()
        except Exception as error:  # of any kind: the other ranks would wait for this one
            failure = error
        own_state = FAILURE if failure else BATCH if len(self._pool) else NO_BATCH
        state = self._agree(own_state) if self._config.epochs is not None else own_state
        if failure is not None:
            raise failure
        if state == FAILURE:
            raise FailedOnAnotherRank
        if state == NO_BATCH:
            raise StopIteration
        keys = self._pool.take() if own_state == BATCH else []
        self._latest = [self._origins.pop(key) for key in keys]
        samples = [(origin.source, self._samples.pop(key)) for origin, key in zip(self._latest, keys, strict=True)]
        self._drop_stream_positions()
        return make_batch(samples, pad_to=self._pad_to, pad_token_id=self._pad_token_id)

    def places(self) -> list[str]:
        return [origin.where for origin in self._latest]

    def _drop_stream_positions(self) -> None:
        """Keeps only the latest stream position before all waiting samples, and later ones."""
        oldest = self._oldest_needed()
        usable = [number for number in self._stream_positions if number <= oldest]
        for number in usable[:-1]:
            del self._stream_positions[number]

    def _oldest_needed(self) -> int:
        """The first record that must be read again to resume."""
        return min([self._next, *(number for number, _ in self._pool)])

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        first = max(number for number in self._stream_positions if number <= self._oldest_needed())
        share = self._stream.share
        return {
            "settings": self._settings,
            "share": [share.index, share.count],
            "stream": self._stream_positions[first],
            "first": first,
            "since": max(share.since, self._next),
            "left": sorted(number for number in share.leftover if number >= self._next),
            "waiting": [list(key) for key in self._pool],
            "counters": self.counters.as_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_same(self._settings, state["settings"])
        index, count = self._stream.share.index, self._stream.share.count
        if state["share"] != [index, count]:
            raise DataError(
                f"The saved position is of share {state['share'][0]} of {state['share'][1]} of the samples, and this "
                f"rank reads share {index} of {count}. To fix: use the positions of all ranks, loader.position_of(None, ...)."
            )
        self._stream.load_state_dict(state["stream"])
        self.counters = Counters.from_dict(state["counters"])
        waiting = [(number, piece) for number, piece in state["waiting"]]
        leftover = frozenset(state["left"]).union(number for number, _ in waiting)
        self._start(state["first"], Share(index, count, state["since"], leftover), waiting, state)

    def position_of(
        self, saved: dict[str, Any] | None, all_ranks: Callable[[], list[dict[str, Any]]]
    ) -> dict[str, Any]:
        share = self._stream.share
        if saved is not None and saved.get("share") == [share.index, share.count]:
            return saved
        states = all_ranks()
        for state in states:
            require_same(self._settings, state["settings"])
        return redistribute(states, share.index, share.count)


def redistribute(states: Sequence[dict[str, Any]], index: int, count: int) -> dict[str, Any]:
    """The position of rank `index` of `count`, from those of all ranks of an earlier run, saved at the same step.

    Raises:
        DataError: a share of the samples has no position.
    """
    by_share = {state["share"][0]: state for state in states}  # the same on all ranks of an SP group
    shares = states[0]["share"][1]
    if missing := sorted(set(range(shares)) - set(by_share)):
        raise DataError(
            f"The saved positions are of {shares} shares of the samples, but those of {missing} are missing."
        )
    since = max(state["since"] for state in states)
    leftover: dict[int, list[int] | None] = {}  # record number -> its waiting samples; None: all
    for share, state in by_share.items():
        leftover |= dict.fromkeys(state["left"])
        leftover |= dict.fromkeys(number for number in range(state["since"], since) if number % shares == share)
        for number, piece in state["waiting"]:
            pieces = leftover.setdefault(number, [])
            assert pieces is not None, "a record with waiting samples was read"
            pieces.append(piece)
    own_records = sorted(leftover)[index::count]
    earliest = min(states, key=lambda state: state["first"])
    counters = Counters()
    for state in by_share.values() if index == 0 else ():  # counted once over all ranks
        counters.merge(Counters.from_dict(state["counters"]))
    return {
        "settings": earliest["settings"],
        "share": [index, count],
        "stream": earliest["stream"],
        "first": earliest["first"],
        "since": since,
        "left": [number for number in own_records if leftover[number] is None],
        "waiting": [[number, piece] for number in own_records for piece in leftover[number] or ()],
        "counters": counters.as_dict(),
    }


def _rebuild_in_worker(packages: dict[str, list[str]], rules: dict[str, batch_fields.FieldRule]) -> _PreparedRecords:
    registry.add_packages(packages)
    batch_fields.declare(rules, "the process that started this one")
    return _PreparedRecords.__new__(_PreparedRecords)


def _identity(sample: Any) -> Any:
    return sample


def _one_thread(worker: int) -> None:
    """Disables threads of tokenizers in a worker: they do not work after a fork, and warn about it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
