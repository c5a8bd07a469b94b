"""Appends rows to the results of a benchmark: in `$OUT`, or else beside the benchmark."""

from __future__ import annotations

import csv
import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def append(results: Path, columns: Sequence[str], rows: Iterable[Mapping], **stamp: str) -> Path:
    """Appends rows, each with today's date and `stamp`; a new file gets a header. Returns the file.

    Args:
        results: the file that the repository keeps.
    """
    target = Path(os.environ.get("OUT", results.parent)) / results.name
    is_new = not target.exists()
    with target.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if is_new:
            writer.writeheader()
        writer.writerows({"date": datetime.date.today().isoformat(), **stamp, **row} for row in rows)
    return target
