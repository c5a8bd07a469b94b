"""Reads the layout of a training checkpoint: lazy tensors of the shards in files of torch's distributed checkpoint."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.lazy_tensors import LazyTensor, Region, leaf
from patchgen.runtime.checkpoint.safetensor_files import StoredTensor
from patchgen.runtime.checkpoint.tensor_index import read_index
from patchgen.runtime.checkpoint.train_state import MODEL


@dataclass(frozen=True)
class StoredShard:
    """A part of a tensor in a file of torch's distributed checkpoint."""

    region: Region
    stored: StoredTensor


def stored_shards(folder: Path) -> dict[str, LazyTensor]:
    """The tensors of the model in a training checkpoint, as leaves whose source is a list of shards."""
    index = read_index(folder)
    tensors = {}
    for key, entry in index.state_dict_metadata.items():
        if not key.startswith(MODEL):
            continue
        shards = []
        assert isinstance(entry, TensorStorageMetadata), "`read_index` admits only tensors"
        for chunk in entry.chunks:
            info = index.storage_data[MetadataIndex(key, chunk.offsets)]
            file = folder / info.relative_path
            offset = info.offset + _data_offset(file, info.offset, info.length, key)
            region = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            shards.append(
                StoredShard(region, StoredTensor(key, file, entry.properties.dtype, tuple(chunk.sizes), offset))
            )
        name = key.removeprefix(MODEL)
        tensors[name] = leaf(name, entry.size, entry.properties.dtype, shards)
    return tensors


class _FileSection:
    """A part of a file as a file object, for zipfile and torch.load."""

    def __init__(self, stream, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._position = stream, start, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._length)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        remaining = self._length - self._position
        count = remaining if count is None or count < 0 else min(count, remaining)
        self._stream.seek(self._start + self._position)
        data = self._stream.read(count)
        self._position += len(data)
        return data


def _data_offset(file: Path, start: int, length: int, key: str) -> int:
    """The offset from `start` of the elements of a tensor that torch.save wrote there, uncompressed, as one record.

    Raises:
        CheckpointError: it was written in another way, or the file is damaged.
    """
    try:
        with file.open("rb") as stream:
            part = _FileSection(stream, start, length)  # has the methods of IO that torch calls
            tensor = torch.load(cast("IO[bytes]", part), map_location="meta", weights_only=True)
            part.seek(0)
            with zipfile.ZipFile(part) as archive:
                records = [entry for entry in archive.infolist() if "/data/" in entry.filename]
            if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED or not tensor.is_contiguous():
                raise CheckpointError(f"{key} in {file} is not stored as one contiguous, uncompressed record.")
            part.seek(records[0].header_offset + 26)  # the local header ends with the lengths of name and extra field
            lengths = part.read(4)
            name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
            return records[0].header_offset + 30 + name + extra + tensor.storage_offset() * tensor.element_size()
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:
        raise CheckpointError(f"{key} cannot be read from {file}: {error}") from error
