"""A record: one sample of a source, not yet parsed, with its place for error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.text_files import UnreadableText, read_text


@dataclass(frozen=True, slots=True)
class Record:
    """`value` is a line of JSON (bytes), the path of a text file, or the fields (a dict)."""

    where: str
    value: bytes | Path | dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """The fields of the sample; text files have one, `text`. Raises BadSample if it cannot be read."""
        try:
            if isinstance(self.value, Path):
                return {"text": read_text(self.value)}
            fields = self.value if isinstance(self.value, dict) else json.loads(self.value.rstrip())
            # JSON may contain lone surrogates ("\\ud83d"), on which tokenizers fail; media are checked later.
            json.dumps(fields, ensure_ascii=False, skipkeys=True, default=_as_null).encode()
        except UnicodeEncodeError as error:
            surrogate = error.object[error.start : error.end]
            raise BadSample(self.where, f"not readable: {surrogate!a} in a text is not a valid character") from error
        except (OSError, UnicodeDecodeError, UnreadableText, json.JSONDecodeError) as error:
            raise BadSample(self.where, f"not readable: {error}") from error
        if not isinstance(fields, dict):
            raise BadSample(self.where, f"expected one JSON object, found {type(fields).__name__}")
        return fields


def _as_null(value: Any) -> None:
    """None, for values that JSON has no type for: images, sounds, bytes, dates."""


class Source(Protocol):
    """Samples in a fixed order. A source with random access has `__len__` and `__getitem__(index) -> Record`, too.

    A position is what `read` yields with each record: reading from it yields the following records.

    Attributes:
        name: for messages.
    """

    name: str

    def read(self, position: Any = None) -> Iterator[tuple[Record, Any]]:
        """The records from `position` on (None: from the first), each with the position after it."""
        ...

    def fingerprint(self) -> Any:
        """A value of JSON types that changes when the samples do."""
