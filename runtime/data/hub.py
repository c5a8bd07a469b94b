"""Samples from Hugging Face datasets: in a folder or on the hub, read or streamed."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patchgen.runtime.data.arrow_rows import ArrowRows
from patchgen.runtime.data.cache import FULL_DISK_ERRORS
from patchgen.runtime.data.config import SourceConfig
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.records import Record


class HubDataset:
    """A map-style dataset; a position is the index of the next row."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self.name = name
        self._as_written = _as_written(dataset)

    def read(self, position: int | None = None) -> Iterator[tuple[Record, int]]:
        for index in range(position or 0, len(self.dataset)):
            yield self[index], index + 1

    def fingerprint(self) -> list[Any]:
        return [self.name, self.dataset._fingerprint, len(self.dataset)]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Record:
        return Record(f"{self.name}, row {index + 1}", self.row(index))

    def row(self, index: int) -> dict[str, Any]:
        """The fields of a row, as they were written."""
        return self._as_written(self.dataset[index])


class HubStream:
    """A streamed dataset; a position is the number of rows read, a state of the dataset, and the rows read since that state."""

    STATE_EVERY = 256

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self.name = name
        self._as_written = _as_written(dataset)
        self._start = dataset.state_dict()

    def read(self, position: list[Any] | None = None) -> Iterator[tuple[Record, list[Any]]]:
        row, state, since = position or (0, self._start, 0)
        self.dataset.load_state_dict(state)
        for fields in itertools.islice(self.dataset, since, None):
            row, since = row + 1, since + 1
            if row % self.STATE_EVERY == 0:
                state, since = self.dataset.state_dict(), 0
            yield Record(f"{self.name}, row {row}", self._as_written(fields)), [row, state, since]

    def fingerprint(self) -> list[Any]:
        return [self.name]


def open_dataset(source: SourceConfig) -> HubDataset | HubStream:
    """The dataset of `source.path`: a folder, written by `save_to_disk` or with data files, or a name on the hub."""
    name = f"{source.path}[{source.split}]"
    is_folder = Path(source.path).expanduser().is_dir()
    dataset = _open_folder(source) if is_folder else _load(source, source.path)
    if source.streaming:
        dataset = undecoded(dataset)
        return HubStream(dataset if hasattr(dataset, "load_state_dict") else dataset.to_iterable_dataset(), name)
    return HubDataset(undecoded(dataset), name)


def _load(source: SourceConfig, path: str) -> Any:
    """The split of `datasets.load_dataset`.

    Raises:
        DataError: there are no such data, they cannot be read or do not fit into the cache of datasets, or they have no such
            split or subset.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return datasets.load_dataset(path, source.subset, split=source.split, streaming=source.streaming)
    except (OSError, ValueError, DatasetsError) as error:  # an unknown split or subset is a ValueError
        raise DataError(_why_not_loaded(source, path, error)) from error


def _why_not_loaded(source: SourceConfig, path: str, error: Exception) -> str:
    """What an error of `datasets.load_dataset` means, and how to fix it."""
    from datasets import config
    from datasets.exceptions import ChecksumVerificationError, DatasetBuildError

    full_disk = _full_disk_error(error)
    if full_disk is not None:
        return (
            f"{source.path} does not fit into the cache of datasets, {config.HF_DATASETS_CACHE}: "
            f"{os.strerror(full_disk)}. To fix: {FULL_DISK_ERRORS[full_disk]}, or set HF_HOME to a folder on another disk."
        )
    if isinstance(error, OSError):
        is_folder = Path(path).is_dir()
        reason = "the folder" if is_folder else "it is not a local file or folder, and"
        place = "by datasets" if is_folder else "from the hub"
        return f"No data at {source.path}: {reason} could not be loaded {place}: {error}"
    if isinstance(error, DatasetBuildError | ChecksumVerificationError):
        return f"The files of {source.path} cannot be read by datasets: {error.__cause__ or error}. To fix: repair or remove them."
    return (
        f"{source.path} cannot be loaded with split = {source.split}, subset = {source.subset}: {error}. To fix: set "
        "data.sources[].split and subset to those that the dataset has."
    )


def _full_disk_error(error: BaseException | None) -> int | None:
    """The number of the write error that an error of datasets is caused by; None: it is no write error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _as_written(dataset: Any) -> ArrowRows:
    """What removes Arrow's padding from the rows of a dataset, of which some streamed ones do not know their columns."""
    return ArrowRows(dataset.features.arrow_schema if dataset.features else None, parse_json=False)


def undecoded(dataset: Any) -> Any:
    """The dataset with media as bytes or paths, so that unreadable media are bad samples and do not stop the iteration."""
    for name, feature in (dataset.features or {}).items():
        changed = _undecoded_feature(feature)
        if changed != feature:
            dataset = dataset.cast_column(name, changed)
    return dataset


def _undecoded_feature(feature: Any) -> Any:
    """The feature with its media not decoded, also those in lists and mappings."""
    import datasets

    if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
        return dataclasses.replace(feature, decode=False)
    if isinstance(feature, datasets.List | datasets.LargeList):
        return dataclasses.replace(feature, feature=_undecoded_feature(feature.feature))
    if isinstance(feature, Mapping):
        return {name: _undecoded_feature(part) for name, part in feature.items()}
    return feature


def _open_folder(source: SourceConfig) -> Any:
    import datasets

    path = Path(source.path).expanduser()
    if not any((path / mark).exists() for mark in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return _load(source, str(path))
    if source.subset is not None:
        raise DataError(
            f"{source.path} was saved by datasets and has no subsets, and the source has subset = {source.subset}. To fix: "
            "remove it, or name the folder of that subset."
        )
    dataset = datasets.load_from_disk(str(path))
    if isinstance(dataset, datasets.DatasetDict):
        if source.split not in dataset:
            raise DataError(
                f"{source.path} has the splits {', '.join(map(str, dataset))}, not {source.split} (data.sources[].split)."
            )
        return dataset[source.split]
    if source.split not in (SourceConfig.split, str(dataset.split)):
        raise DataError(
            f"{source.path} has no splits, and the source has split = {source.split}. To fix: remove it, or "
            "name the folder of that split."
        )
    return dataset
