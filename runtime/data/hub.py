"""Samples from Hugging Face datasets: in a folder or on the hub, read or streamed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchgen.runtime.data.config import SourceConfig
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.records import Record


class HubDataset:
    """A map-style dataset; a position is the index of the next row."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self.name = name

    def read(self, position: int | None = None) -> Iterator[tuple[Record, int]]:
        for index in range(position or 0, len(self.dataset)):
            yield self[index], index + 1

    def fingerprint(self) -> list[Any]:
        return [self.name, self.dataset._fingerprint, len(self.dataset)]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Record:
        return Record(f"{self.name}, row {index + 1}", self.dataset[index])


class HubStream:
    """A streamed dataset; a position is the number of rows read, a state of the dataset, and the rows read since that state."""

    STATE_EVERY = 256

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self.name = name
        self._start = dataset.state_dict()

    def read(self, position: list[Any] | None = None) -> Iterator[tuple[Record, list[Any]]]:
        row, state, since = position or (0, self._start, 0)
        self.dataset.load_state_dict(state)
        for fields in itertools.islice(self.dataset, since, None):
            row, since = row + 1, since + 1
            if row % self.STATE_EVERY == 0:
                state, since = self.dataset.state_dict(), 0
            yield Record(f"{self.name}, row {row}", fields), [row, state, since]

    def fingerprint(self) -> list[Any]:
        return [self.name]


def open_dataset(source: SourceConfig) -> HubDataset | HubStream:
    """The dataset of `source.path`: a folder, written by `save_to_disk` or with data files, or a name on the hub."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    name = f"{source.path}[{source.split}]"
    if Path(source.path).expanduser().is_dir():
        dataset = _open_folder(source)
    else:
        try:
            dataset = datasets.load_dataset(source.path, source.subset, split=source.split, streaming=source.streaming)
        except (OSError, DatasetNotFoundError) as error:
            raise DataError(
                f"No data at {source.path}: it is not a local file or folder, and could not be loaded from the hub: {error}"
            ) from error
    if source.streaming:
        dataset = undecoded(dataset)
        return HubStream(dataset if hasattr(dataset, "load_state_dict") else dataset.to_iterable_dataset(), name)
    return HubDataset(undecoded(dataset), name)


def undecoded(dataset: Any) -> Any:
    """The dataset with media as bytes or paths, so that unreadable media are bad samples and do not stop the iteration."""
    import datasets

    media = (datasets.Image, datasets.Audio, datasets.Video)
    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, media):
            dataset = dataset.cast_column(name, type(feature)(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, media):
            dataset = dataset.cast_column(name, datasets.List(type(feature.feature)(decode=False)))
    return dataset


def _open_folder(source: SourceConfig) -> Any:
    import datasets

    path = Path(source.path).expanduser()
    if not any((path / mark).exists() for mark in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return datasets.load_dataset(str(path), source.subset, split=source.split, streaming=source.streaming)
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
