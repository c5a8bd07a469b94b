"""Samples from files of plain text and Parquet, and what all sources of files share."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.runtime.data.arrow_rows import ArrowRows
from patchgen.runtime.data.config import SUFFIXES, format_of_name
from patchgen.runtime.data.hub import HubDataset, undecoded
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.records import Record

END_BYTES = 65536  # bytes hashed at each end of a file


def find_files(path: str, format: str) -> list[Path]:
    """The files of `path`, sorted: a file, those of a folder (recursively) with a suffix of the format, or those of a glob.

    Raises DataError if there are none.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    suffixes = [suffix for suffix, name in SUFFIXES.items() if name == format]
    if place.is_dir():
        files = [file for file in place.rglob("*") if file.is_file() and format_of_name(file) == format]
        expected = f"files ending in {', '.join(suffixes)}"
    else:
        anchor = Path(place.anchor or ".")
        files = [file for file in anchor.glob(str(place.relative_to(place.anchor))) if file.is_file()]
        expected = "a file, a folder or a glob"
    if not files:
        raise DataError(f"No data at {path}: expected {expected} (read as {format}), found none.")
    return sorted(files)


class Files:
    """A source of files. A position is a list of integers, the first of which is the index of a file."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self.name = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"

    def fingerprint(self) -> list[list[Any]]:
        """Path, size and modification time of each file."""
        stats = [(file.resolve(), file.stat()) for file in self.files]
        return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]

    def contents(self) -> list[list[Any]]:
        """What must not change when a run resumes: name, size and a hash of both ends of each file."""
        contents = []
        for file in self.files:
            size = file.stat().st_size
            with file.open("rb") as stream:
                ends = stream.read(END_BYTES)
                stream.seek(max(0, size - END_BYTES))
                ends += stream.read(END_BYTES)
            contents.append([file.name, size, hashlib.sha256(ends).hexdigest()])
        return contents


class TextFiles(Files):
    """One document per file."""

    def read(self, position: list[int] | None = None) -> Iterator[tuple[Record, list[int]]]:
        for index in range(position[0] if position else 0, len(self.files)):
            yield self[index], [index + 1]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Record:
        return Record(str(self.files[index]), self.files[index])


class Parquet(Files):
    """One row per sample."""

    def read(self, position: list[int] | None = None) -> Iterator[tuple[Record, list[int]]]:
        import pyarrow.parquet

        first, row = position or (0, 0)
        for file_index in range(first, len(self.files)):
            file = pyarrow.parquet.ParquetFile(self.files[file_index])
            as_written = ArrowRows(file.schema_arrow, parse_json=True)
            rows_before = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if rows_before + rows <= row:
                    rows_before += rows
                    continue
                for batch in file.iter_batches(batch_size=256, row_groups=[group]):
                    for fields in batch.slice(min(max(row - rows_before, 0), len(batch))).to_pylist():
                        row += 1
                        yield Record(f"{self.files[file_index]}, row {row}", as_written(fields)), [file_index, row]
                    rows_before += len(batch)
            row = 0

    @functools.cached_property
    def _table(self) -> HubDataset:
        """The rows as a memory-mapped table of `datasets`, for random access."""
        import datasets

        table = datasets.load_dataset("parquet", data_files=[str(file) for file in self.files], split="train")
        return HubDataset(undecoded(table), self.name)

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """`(files + 1,)`: the index of the first row of each file, and the number of all rows."""
        import pyarrow.parquet

        return np.cumsum([0, *(pyarrow.parquet.read_metadata(file).num_rows for file in self.files)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Record:
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return Record(f"{self.files[file]}, row {index - self._starts[file] + 1}", self._table.row(index))
