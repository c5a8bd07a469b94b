"""Samples that cannot be used: where they are, why, and how many."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["bad", "skipped", "truncated"]
MAX_PLACES = 1000
ALL_USED = "all samples used"


class DataError(ValueError):
    """The data cannot be used; the message says where (file and line of a sample) and how to fix it."""


class FailedOnAnotherRank(DataError):
    """Another rank failed on its data, so this one stops."""

    MESSAGE = "Another rank failed on its data; see its message."

    def __init__(self) -> None:
        super().__init__(self.MESSAGE)


class BadSample(Exception):
    """One sample cannot be used: `where` it is (file and line) and `reason`."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where = where
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass
class Counters:
    """How many samples were bad, skipped (too long) or truncated, and where the first thousand of each are.

    A sample of a stream is counted once per epoch, a cached one only once.
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._kept = Counter(outcome for outcome, _, _ in self.places)

    def add(self, outcome: Outcome, where: str, reason: str) -> None:
        self.add_many(outcome, 1, [(where, reason)])

    def add_many(self, outcome: Outcome, count: int, places: Iterable[tuple[str, str]]) -> None:
        """`count` samples, of which `places` `(where, reason)` are the first."""
        self.counts[outcome] += count
        self._keep((outcome, where, reason) for where, reason in places)

    def merge(self, other: Counters) -> None:
        self.counts.update(other.counts)
        self._keep(other.places)

    def _keep(self, places: Iterable[tuple[str, str, str]]) -> None:
        for place in places:
            if self._kept[place[0]] < MAX_PLACES:
                self._kept[place[0]] += 1
                self.places.append(place)

    def summary(self) -> str:
        """One line for logs: the counts, and the first place of each, if it is known."""
        if not self.counts:
            return ALL_USED
        first: dict[str, str] = {}
        for outcome, where, reason in self.places:
            first.setdefault(outcome, f" (first: {where}: {reason})")
        return "; ".join(f"{self.counts[name]} {name}{first.get(name, '')}" for name in sorted(self.counts))

    def as_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "places": [list(place) for place in self.places]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Counters:
        return cls(Counter(data["counts"]), [tuple(place) for place in data["places"]])


def too_long_reason(length: int, limit: int) -> str:
    return f"{length} tokens, more than the limit of {limit} (data.max_length, data.tokens_per_batch)"


def long_reason(length: int, limit: int, *, truncates: bool, outcome: Outcome) -> str:
    """Why a long sample is truncated or skipped.

    Args:
        truncates: whether long samples are truncated (`data.on_long`); one is then skipped only if no token with a loss would
            remain.
    """
    return too_long_reason(length, limit) + (
        f", and none of the first {limit} has a loss" if truncates and outcome == "skipped" else ""
    )


def too_long_error(where: str, length: int, limit: int) -> DataError:
    return DataError(
        f"{where}: {too_long_reason(length, limit)}. To fix: set data.on_long to skip, truncate or split, or raise the limit."
    )


def bad_sample_error(where: str, reason: str) -> DataError:
    return DataError(f"{where}: {reason}. To fix: change the sample, or set data.on_bad to skip.")


ENVIRONMENT_ERRORS = (ImportError, MemoryError, NotImplementedError)
"""Errors that do not depend on the sample."""


@contextlib.contextmanager
def as_bad_sample(who: str, where: str, what: str = "the sample") -> Iterator[None]:
    """Converts errors of third-party code on a sample to `BadSample`.

    Args:
        who: that code, for the message.
        where: the sample, file and line.
        what: the input, for the message.

    Raises:
        BadSample: `who` raised on the sample.
        DataError: `who` would raise on every sample, for example because a package is missing.
    """
    try:
        yield
    except (BadSample, DataError):
        raise
    except ENVIRONMENT_ERRORS as error:
        raise DataError(f"{where}: {who} cannot be used here: {_one_line(error)}.") from error
    except Exception as error:  # third-party code may raise anything
        raise BadSample(where, f"{who} refuses {what}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """The type and message of an error, in one line."""
    words = " ".join(str(error).split())[:300].rstrip(".")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
