"""Opens the source that a configuration describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchgen.runtime.data.builtin import open_builtin
from patchgen.runtime.data.config import BUILTIN, COMPRESSED, SUFFIXES, SourceConfig, format_of_name
from patchgen.runtime.data.files import Parquet, TextFiles, find_files
from patchgen.runtime.data.hub import open_dataset
from patchgen.runtime.data.json_files import JsonFiles
from patchgen.runtime.data.problems import DataError

READERS = {"jsonl": JsonFiles, "parquet": Parquet, "text": TextFiles}
GLOB_CHARACTERS = "*?["


def open_source(source: SourceConfig) -> Any:
    """The `records.Source` of a configuration; with random access unless it is a streamed dataset."""
    if source.media_root and not Path(source.media_root).expanduser().is_dir():
        raise DataError(
            f"The media_root of {source.path}, {source.media_root}, is not a folder. To fix: name the folder."
        )
    if source.path.startswith(BUILTIN):
        return open_builtin(source.path.removeprefix(BUILTIN), source.split)
    format = source.format if source.format != "auto" else detect_format(source.path)
    if format == "datasets":
        return open_dataset(source)
    options = {name: getattr(source, name) for name in ("split", "subset")}
    dataset_options = [f"{name} = {value}" for name, value in options.items() if value != getattr(SourceConfig, name)]
    if dataset_options:
        raise DataError(
            f"{source.path} is read as {format} files, which have no splits or subsets, but the source has "
            f"{' and '.join(dataset_options)}. To fix: give the path of the split's files, or set format to datasets."
        )
    return READERS[format](find_files(source.path, format))


def detect_format(path: str) -> str:
    """The format by suffix; `datasets` for a folder written by `datasets`, and for a name that is not a file.

    Raises DataError for files without a known suffix.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        if any((place / mark).exists() for mark in ("dataset_info.json", "dataset_dict.json")):
            return "datasets"
        formats = {format for file in place.rglob("*") if (format := format_of_name(file)) is not None}
        if len(formats) == 1:
            return formats.pop()
        if not formats:
            raise DataError(f"{path} has no data files ({', '.join(SUFFIXES)}). To fix: name another folder.")
        raise DataError(
            f"{path} holds {' and '.join(sorted(formats))} files. To fix: set the source's format to one of "
            f"{', '.join(READERS)}, datasets."
        )
    if (format := format_of_name(place)) is not None:
        return format
    if place.exists() or any(character in path for character in GLOB_CHARACTERS):  # names on the hub have none of them
        raise DataError(
            f"{path} has no known suffix ({', '.join(SUFFIXES)}; text also with {' or '.join(COMPRESSED)} after it). To fix: set "
            "the source's format; decompress or convert files of other formats."
        )
    return "datasets"
