"""A record: one sample as a source hands it out, not yet parsed, and the place that errors name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from patchgen.runtime.data.problems import BadSample


@dataclass(frozen=True, slots=True)
class Record:
    """`value` is a line of JSON (bytes), a text file (its path) or the fields themselves (a dict)."""

    where: str
    value: bytes | Path | dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """The fields of the sample; text files have one, `text`. Raises BadSample for what cannot be read."""
        try:
            if isinstance(self.value, Path):
                return {"text": self.value.read_text(encoding="utf-8")}
            fields = self.value if isinstance(self.value, dict) else json.loads(self.value)
            # JSON may hold half a character ("\\ud83d"), over which tokenizers fall; media are looked at later.
            json.dumps(fields, ensure_ascii=False, skipkeys=True, default=_no_text).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.end]
            raise BadSample(self.where, f"not readable: {half!a} in a text is not a valid character") from error
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise BadSample(self.where, f"not readable: {error}") from error
        if not isinstance(fields, dict):
            raise BadSample(self.where, f"expected a JSON object with fields, found {type(fields).__name__}")
        return fields


def _no_text(value: Any) -> None:
    """Values that JSON does not have: images, sounds, bytes, dates."""


class Source(Protocol):
    """Samples in a fixed order.

    A position is what `read` hands out beside each record: reading on from it gives the records that follow.

    Attributes:
        name: what messages call it.
    """

    name: str

    def read(self, position: Any = None) -> Iterator[tuple[Record, Any]]:
        """The records from `position` on (None: from the first), each with the position behind it."""
        ...

    def fingerprint(self) -> Any:
        """What changes when the samples do; JSON types."""


class Sequence(Source, Protocol):
    """A source that also gives any record by its number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Record: ...
