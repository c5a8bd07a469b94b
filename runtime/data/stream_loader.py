"""Batches of samples that are read and prepared while training: streams, and multimodal samples.

Each rank reads its own share (`record_stream.py`), so ranks do not know each other's lengths. With a number of epochs they ask
each other at every batch whether any has one left; those without take part with a batch of padding. Without end they
need not ask.

A position holds the place of an earlier record, and which samples since then still wait: they are read and prepared
again. The positions of all ranks together say which records are left, so any other number of ranks can share them:

    2 ranks   rank 0 has used  0 2 4         waits: 6     next: 8        left: 3 6 and all from 5 on, 6 once
              rank 1 has used  1             waits: 3     next: 5
    3 ranks   3 5 6 7 dealt in turn:   3 7 | 5 | 6     then from 8 on every third
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset

from patchgen.runtime import registry
from patchgen.runtime.data.agreement import BATCH, NOTHING, REFUSAL
from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.loader import Loader, make_batch, require_same
from patchgen.runtime.data.packing import Pool
from patchgen.runtime.data.prepare import Prepare, Prepared
from patchgen.runtime.data.problems import Counters, DataError, RefusedElsewhere, refuse_bad
from patchgen.runtime.data.record_stream import MixedStream, Share
from patchgen.runtime.data.records import Record
from patchgen.runtime.parallel import batch_fields

PLACE_EVERY = 64  # records between two places that a position can start from
POSITIONS = 2  # of this form: records are numbered over all ranks
MOST_WAITING = 16384  # samples in the pool, whatever their tokens

Entry = tuple[int, int, int, Record]  # number of the record, its epoch, its source, the record
Key = tuple[int, int]  # number of the record, number of the sample in it


class Origin(NamedTuple):
    """Where a record comes from."""

    epoch: int
    source: int
    where: str


class _Workers(Dataset):
    """Prepares the records that the sampler hands it, in worker processes if there are any."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare

    def __reduce__(self) -> tuple:
        # A worker that was not forked knows neither the folders of the user's own classes nor the rules of their inputs.
        return _in_fresh_process, (_Known(registry.local_packages(), batch_fields.declared_rules()), self.prepare)

    def __getitem__(self, entry: Entry) -> tuple[int, Origin, Prepared]:
        number, epoch, source, record = entry
        return number, Origin(epoch, source, record.where), self.prepare(source, record)


class StreamedLoader(Loader):
    """Batches of prepared samples. A position holds on the rank that it was saved on; `position_of` makes those of
    other numbers of ranks.

    Args:
        config: how samples become batches.
        stream: the records of this rank.
        prepare: makes samples of them.
        settings: what a saved position must agree with, of plain types.
        pad_token_id: fills padded batches.
        agree: the highest number of any rank; see `agreement.highest`.
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
        agree: Callable[[int], int],
    ) -> None:
        self.counters = Counters()
        self._config = config
        self._stream = stream
        self._prepare = prepare
        self._settings = settings | {"positions": POSITIONS}
        self._pad_token_id = pad_token_id
        self._pad_to = config.tokens_per_batch if config.pad_batches else None
        self._agree = agree
        self._start(0, stream.share, [], None)

    def _start(self, first: int, share: Share, waiting: Sequence[Key], state: dict[str, Any] | None) -> None:
        """Goes on with record `first`, which the stream gives next.

        Args:
            share: what of the stream is used, records of `waiting` among it.
            waiting: samples that waited; of their records the others were used before.
        """
        self._pool: Pool[Key] = Pool(
            self._config.tokens_per_batch,
            best_fit=self._config.packing,
            apart=self._config.separate_modalities or (),
        )
        self._samples: dict[Key, dict[str, Any]] = {}
        self._origins: dict[Key, Origin] = {}
        self._latest: list[Origin] = []
        self._places = {first: self._stream.state_dict()}
        self._stream.share = share
        self._next = first
        self._waiting: dict[int, set[int]] = {}
        for number, piece in waiting:
            self._waiting.setdefault(number, set()).add(piece)
        self._upto = max(self._waiting, default=first - 1) + 1
        self._epoch = self._stream.epoch
        self._usable_epoch: int | None = None
        self._prepared: Iterator[tuple[int, Origin, Prepared]] | None = None
        self._loaded = state

    @property
    def epoch(self) -> int:
        return self._epoch

    def _entries(self) -> Iterator[Entry]:
        """Runs in this process, as far ahead as the workers are fed."""
        for count, (number, source, record) in enumerate(self._stream, 1):
            if count % PLACE_EVERY == 0:
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

    def _take_in(self, number: int, origin: Origin, prepared: Prepared) -> None:
        self._next = number + 1
        waiting = self._waiting.pop(number, None)  # None: it was not read before
        if prepared.problem is not None and waiting is None:
            outcome, where, reason = prepared.problem
            if outcome == "bad" and self._config.on_bad == "error":
                raise refuse_bad(where, reason)
            self.counters.add(outcome, where, reason)
        self._require_usable(number, origin.epoch, prepared)
        for piece, sample in enumerate(prepared.samples):
            key = (number, piece)
            if waiting is None or piece in waiting:
                self._samples[key] = sample
                self._origins[key] = origin
                self._pool.add(key, sample["input_ids"].shape[-1], prepared.modalities)

    def _require_usable(self, number: int, epoch: int, prepared: Prepared) -> None:
        """Refuses a share of the samples of which none was usable in a whole epoch: an endless search."""
        if number < self._stream.share.since:  # what an earlier start left of some epoch says nothing of whole ones
            return
        if self._usable_epoch is None or prepared.samples:
            self._usable_epoch = epoch
        elif epoch > self._usable_epoch + 1:
            raise DataError(f"No usable sample for this rank in a whole epoch: {self.counters.summary()}.")

    def __next__(self) -> dict[str, Any]:
        refusal = None
        try:
            self._refill()
        except Exception as error:  # whatever it is, the other ranks must hear of it: they would wait
            refusal = error
        mine = REFUSAL if refusal else BATCH if len(self._pool) else NOTHING
        any_rank = self._agree(mine) if self._config.epochs is not None else mine
        if refusal is not None:
            raise refusal
        if any_rank == REFUSAL:
            raise RefusedElsewhere
        if any_rank == NOTHING:
            raise StopIteration
        keys = self._pool.take() if mine == BATCH else []
        self._latest = [self._origins.pop(key) for key in keys]
        samples = [(origin.source, self._samples.pop(key)) for origin, key in zip(self._latest, keys, strict=True)]
        if keys:
            self._epoch = self._latest[0].epoch
        self._forget_places()
        return make_batch(samples, pad_to=self._pad_to, pad_token_id=self._pad_token_id)

    def places(self) -> list[str]:
        return [origin.where for origin in self._latest]

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
        share = self._stream.share
        return {
            "settings": self._settings,
            "share": [share.index, share.count],
            "stream": self._places[place],
            "first": place,
            "since": max(share.since, self._next),
            "left": sorted(number for number in share.left if number >= self._next),
            "waiting": [list(key) for key in self._pool],
            "counters": self.counters.as_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_same("samples or settings", self._settings, state["settings"])
        index, count = self._stream.share.index, self._stream.share.count
        if state["share"] != [index, count]:
            raise DataError(
                f"The saved position is of share {state['share'][0]} of {state['share'][1]} of the samples, and this "
                f"rank reads share {index} of {count}. Take the positions of all ranks: loader.position_of(None, ...)."
            )
        self._stream.load_state_dict(state["stream"])
        self.counters = Counters.from_dict(state["counters"])
        waiting = [(number, piece) for number, piece in state["waiting"]]
        left = frozenset(state["left"]).union(number for number, _ in waiting)
        self._start(state["first"], Share(index, count, state["since"], left), waiting, state)

    def position_of(self, own: dict[str, Any] | None, all_ranks: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
        share = self._stream.share
        if own is not None and own.get("share") == [share.index, share.count]:
            return own
        states = all_ranks()
        for state in states:
            require_same("samples or settings", self._settings, state["settings"])
        return dealt_anew(states, share.index, share.count)


def dealt_anew(states: Sequence[dict[str, Any]], index: int, count: int) -> dict[str, Any]:
    """The position of rank `index` of `count` out of those of all ranks of an earlier start, saved at one moment.

    Raises:
        DataError: a share of the samples has no position.
    """
    by_share = {state["share"][0]: state for state in states}  # ranks of one SP group have the same
    shares = states[0]["share"][1]
    if missing := sorted(set(range(shares)) - set(by_share)):
        raise DataError(f"The saved positions are of {shares} shares of the samples, and of {missing} there is none.")
    since = max(state["since"] for state in states)
    left: dict[int, list[int] | None] = {}  # number of the record -> the samples of it that waited; None: all of it
    for share, state in by_share.items():
        left |= dict.fromkeys(state["left"])
        left |= dict.fromkeys(number for number in range(state["since"], since) if number % shares == share)
        for number, piece in state["waiting"]:
            pieces = left.setdefault(number, [])
            assert pieces is not None, "a record of which samples wait was read, so it is not left as a whole"
            pieces.append(piece)
    mine = sorted(left)[index::count]
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
        "left": [number for number in mine if left[number] is None],
        "waiting": [[number, piece] for number in mine for piece in left[number] or ()],
        "counters": counters.as_dict(),
    }


@dataclass(frozen=True)
class _Known:
    """What a worker that was not forked must know before it reads what comes after: it learns it by reading this."""

    packages: dict[str, list[str]]
    rules: dict[str, batch_fields.FieldRule]

    def __reduce__(self) -> tuple:
        return _know, (self.packages, self.rules)


def _know(packages: dict[str, list[str]], rules: dict[str, batch_fields.FieldRule]) -> None:
    registry.know_packages(packages)
    batch_fields.declare(rules, "the process that started this one")


def _in_fresh_process(_known: None, prepare: Prepare) -> _Workers:
    return _Workers(prepare)


def _as_it_is(sample: Any) -> Any:
    return sample


def _one_thread(worker: int) -> None:
    """Tokenizers do not start threads in a worker: they cannot after a fork, and warn of it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
