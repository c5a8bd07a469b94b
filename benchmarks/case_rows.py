"""The cases of a benchmark and their results, in a file: a case that kills the process loses only its own result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNFINISHED = "did not end"  # the result of a case until it has one


class CaseRows:
    """One row per case, in the order in which cases were first added; the row that was added last counts.

    Args:
        columns: those that identify the case of a row.
        result: the column that is `UNFINISHED` until the case has ended.
        path: a file of JSON lines, a row each, read at the start and appended to. None: rows are lost with the process.
        writes: whether this process writes the file; one of several ranks does.
    """

    def __init__(
        self, columns: tuple[str, ...], *, result: str, path: Path | None = None, writes: bool = True
    ) -> None:
        self.columns, self.result = columns, result
        self._rows = {self._case(row): row for row in read_rows(path)}
        self._path = path if writes else None

    def _case(self, row: Mapping[str, Any]) -> tuple:
        return tuple(row[name] for name in self.columns)

    def __contains__(self, row: Mapping[str, Any]) -> bool:
        return self._case(row) in self._rows

    def __iter__(self):
        return iter(self._rows.values())

    def start(self, row: Mapping[str, Any]) -> None:
        """Records that a case has started, so that it is not started again."""
        self.add({**row, self.result: UNFINISHED})

    def add(self, row: dict[str, Any]) -> None:
        """Replaces the row of a case."""
        self._rows[self._case(row)] = row
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows of a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []
