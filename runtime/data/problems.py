"""Samples that cannot be used: where each is, why, and how many there were."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["bad", "skipped", "truncated"]
REMEMBERED = 1000
ALL_USED = "all samples used"


class DataError(ValueError):
    """The data cannot be used as asked; the message says which file and line, and what to do."""


class RefusedElsewhere(DataError):
    """Another rank stopped on its data, so this one stops as well."""

    MESSAGE = "Another rank stopped on its data: its own message says why."

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
    """How many samples were bad, skipped (too long) or truncated, and where the first thousand of them are.

    One sample counts once per epoch that is read from a stream and once in all where it is read from a cache.
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, outcome: Outcome, where: str, reason: str) -> None:
        self.add_many(outcome, 1, [(where, reason)])

    def add_many(self, outcome: Outcome, count: int, places: Iterable[tuple[str, str]]) -> None:
        """`count` samples, of which `places` `(where, reason)` are the first."""
        self.counts[outcome] += count
        self.places += [(outcome, where, reason) for where, reason in places][: REMEMBERED - len(self.places)]

    def merge(self, other: Counters) -> None:
        self.counts.update(other.counts)
        self.places.extend(other.places[: REMEMBERED - len(self.places)])

    def summary(self) -> str:
        """One line for people: the counts, and the first place of each."""
        if not self.counts:
            return ALL_USED
        first: dict[str, str] = {}
        for outcome, where, reason in self.places:
            first.setdefault(outcome, f"{where}: {reason}")
        return "; ".join(f"{self.counts[name]} {name} (first: {first[name]})" for name in sorted(self.counts))

    def as_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "places": [list(place) for place in self.places]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Counters:
        return cls(Counter(data["counts"]), [tuple(place) for place in data["places"]])


def too_long(length: int, limit: int) -> str:
    return f"{length} tokens, more than the {limit} that a sample may have (data.max_length, data.tokens_per_batch)"


def long_reason(length: int, limit: int, *, cut: bool, outcome: Outcome) -> str:
    """Why a long sample is cut, or skipped: as configured, or because no token with a loss would be left."""
    return too_long(length, limit) + (", and none with a loss among the first" if cut and outcome == "skipped" else "")


def refuse_long(where: str, length: int, limit: int) -> DataError:
    return DataError(
        f"{where}: {too_long(length, limit)}. Set data.on_long to skip, truncate or split, or raise the limit."
    )


def refuse_bad(where: str, reason: str) -> DataError:
    return DataError(f"{where}: {reason}. Fix the sample, or set data.on_bad to skip to go on without such samples.")


NOT_OF_A_SAMPLE = (ImportError, MemoryError, NotImplementedError)
"""Errors that every other sample would meet as well."""


@contextlib.contextmanager
def refusals_of(who: str, where: str, what: str = "the sample") -> Iterator[None]:
    """Errors that foreign code raises on a sample become `BadSample`.

    Args:
        who: that code, for people.
        where: the sample, file and line.
        what: it is given.

    Raises:
        BadSample: `who` refuses it, in its own words.
        DataError: it would refuse every other sample as well: a package is missing, say.
    """
    try:
        yield
    except (BadSample, DataError):
        raise
    except NOT_OF_A_SAMPLE as error:
        raise DataError(f"{where}: {who} cannot be used here: {_one_line(error)}.") from error
    except Exception as error:  # it is somebody else's: what it raises is not known
        raise BadSample(where, f"{who} refuses {what}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """An error in one line."""
    words = " ".join(str(error).split())[:300].rstrip(".")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
