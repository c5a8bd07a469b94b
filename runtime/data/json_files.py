"""Samples from JSON files: lines with an object each, an array of objects, or an object with an array of objects in `data`.

    {"text": "a"}            [{"text": "a"},          {"version": 1,
    {"text": "b"}             {"text": "b"}]           "data": [{"text": "a"}, {"text": "b"}]}

What a file holds is told by its content. Any of them may be compressed, or in UTF-16 (`text_files.py`).
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from patchgen.runtime.data.config import inner_suffix
from patchgen.runtime.data.files import Files
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.text_files import UnreadableText, is_plain, open_utf8

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DATA = "data"
"""The key of an object that holds the rows."""


class JsonFiles(Files):
    """An object per sample; empty lines are not samples."""

    def read(self, position: list[int] | None = None) -> Iterator[tuple[Record, list[int]]]:
        first, offset, line = position or (0, 0, 0)
        for file_index in range(first, len(self.files)):
            for record, offset, line in _records(self.files[file_index], offset, line):  # noqa: B020 - of this file, then 0
                yield record, [file_index, offset, line]
            offset = line = 0

    @functools.cached_property
    def _held(self) -> list[list[Record] | None]:
        """By file, its records if they have no offsets: of arrays, and of files that are compressed or in UTF-16."""
        return [
            None if is_plain(file) and _array_of(file) is None else [record for record, _, _ in _records(file)]
            for file in self.files
        ]

    @functools.cached_property
    def _index(self) -> np.ndarray:
        """`(samples, 3)`: file, offset in bytes and line of each; of files that are held, the number of its record twice."""
        rows = []
        for file_index, (file, held) in enumerate(zip(self.files, self._held, strict=True)):
            if held is not None:
                rows += [(file_index, number, number) for number in range(len(held))]
                continue
            offset = 0
            with _open(file) as stream:
                for line, text in enumerate(stream, 1):
                    if text.strip():
                        rows.append((file_index, offset, line))
                    offset += len(text)
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Record:
        file, offset, line = (int(value) for value in self._index[index])
        held = self._held[file]
        if held is not None:
            return held[offset]
        with _open(self.files[file]) as stream:
            stream.seek(offset)
            return Record(f"{self.files[file]}:{line}", stream.readline())


@contextlib.contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    """`open_utf8`; a damaged file is a DataError, since the rest of its samples cannot be found."""
    try:
        with open_utf8(file) as stream:
            yield stream
    except UnreadableText as error:
        raise DataError(str(error)) from error


def _records(file: Path, offset: int = 0, line: int = 0) -> Iterator[tuple[Record, int, int]]:
    """The records of a file from a position on, each with the position after it: of lines the offset in bytes and the number of
    the line, of an array the number of the row twice."""
    rows = _array_of(file)
    if rows is not None:
        for number, row in enumerate(rows[offset:], offset + 1):
            value = row if isinstance(row, dict) else json.dumps(row).encode()  # refused when it is read
            yield Record(f"{file}, row {number}", value), number, number
        return
    with _open(file) as stream:
        stream.seek(offset)
        for text in stream:
            line += 1
            offset += len(text)
            if text.strip():
                yield Record(f"{file}:{line}", text), offset, line


def _array_of(file: Path) -> list[Any] | None:
    """The rows of a file that holds an array, or an object with one in `data`; None: it holds lines.

    Raises:
        DataError: it begins an array that is not valid JSON.
    """
    with _open(file) as stream:
        first_line = next((line for line in stream if line.strip(BYTE_ORDER_MARK).strip()), b"")
        start = first_line.removeprefix(BYTE_ORDER_MARK).lstrip()
        is_array = start.startswith(b"[")
        may_hold_array = inner_suffix(file) == ".json" and start.startswith(b"{") and not _is_sample(_value_of(start))
        if not is_array and not may_hold_array:
            return None
        stream.seek(0)
        content = stream.read()
    try:
        document = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        if not is_array or _value_of(start) is not None:  # lines, of which one is broken or is an array
            return None
        place = f"{file}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else file
        raise DataError(
            f"{place}: not a valid JSON array: {error}. To fix: repair the file, or write lines."
        ) from error
    rows = document.get(DATA) if isinstance(document, dict) else document
    if isinstance(rows, list) and (is_array or _holds_rows(document)):
        return rows
    raise DataError(
        f"{file} holds one JSON object over several lines, with {', '.join(document)}; expected a list of objects, an object with "
        f"one in {DATA!r}, or lines with an object each."
    )


def _is_sample(first: Any) -> bool:
    """Whether the value of a first line is a sample, not an object with rows, and not a part of one."""
    return isinstance(first, dict) and not _holds_rows(first)


def _holds_rows(document: dict[str, Any]) -> bool:
    """Whether `data` of an object are rows: a list with objects. Lists of anything else are a field of a sample."""
    rows = document.get(DATA)
    return isinstance(rows, list) and (not rows or any(isinstance(row, dict) for row in rows))


def _value_of(line: bytes) -> Any:
    """The value of a line of JSON; None if it is not complete."""
    try:
        return json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
