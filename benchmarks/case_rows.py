"""The cases of a bench and what they gave, in a file that outlives the process: a case that kills it costs one case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STARTED = "did not end"  # what stands for the result of a case until there is one


class CaseRows:
    """One row per case, in the order in which cases were first added; the row that was added last counts.

    Args:
        columns: of a row: those that say which case it is.
        result: the column that has `STARTED` until the case has ended.
        path: JSON lines, a row each, written as rows are added and read at the start. None: nothing outlives the process.
        writes: whether this process writes the file; of several ranks, one.
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
        """Notes that a case begins: from now on it is never begun again."""
        self.add({**row, self.result: STARTED})

    def add(self, row: dict[str, Any]) -> None:
        """Replaces what is known of a case."""
        self._rows[self._case(row)] = row
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []
