"""The index of torch's distributed checkpoint, read without running anything.

`.metadata` is a pickle, and a pickle may call what it likes while it is read: torch's own reader lets it. Here only the
classes that an index is made of are admitted, and only places inside the checkpoint.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.serialization import _get_layout

from patchgen.runtime.checkpoint.errors import CheckpointError

INDEX = ".metadata"
_PARTS = (
    Metadata, MetadataIndex, TensorStorageMetadata, metadata.ChunkStorageMetadata, metadata.TensorProperties,
    metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.Size, _get_layout,
)  # fmt: skip
_ADMITTED = {(part.__module__, part.__qualname__): part for part in _PARTS}
_ADMITTED |= {("torch", name): part for name, part in vars(torch).items() if isinstance(part, torch.dtype)}


class _IndexUnpickler(pickle.Unpickler):
    """Finds the parts of an index and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # where it was saved: nobody reads it
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in an index of tensors")
        return _ADMITTED[module, name]


def read_index(folder: Path) -> Metadata:
    """Which tensors a training checkpoint holds, and where their bytes lie.

    Raises:
        CheckpointError: the file is missing or damaged, names anything but tensors, or points outside of `folder`.
    """
    file = folder / INDEX
    try:
        with file.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
        others = [key for key, entry in index.state_dict_metadata.items() if not _is_tensor(entry)]
        astray = [place.relative_path for place in index.storage_data.values() if not _lies_beside(place)]
    except Exception as error:  # what damaged bytes raise is of any kind
        raise CheckpointError(f"{file} was not read: {error}. Nothing in it was run.") from error
    if others or astray:
        problems = [f"{key} is not a tensor" for key in others]
        problems += [f"'{path}' lies outside of {folder}" for path in sorted(set(astray))]
        raise CheckpointError(f"{file} was not read:", problems)
    return index


def _is_tensor(entry: object) -> bool:
    """Anything else torch reads by a pickle that may run code."""
    return isinstance(entry, TensorStorageMetadata) and isinstance(entry.properties, metadata.TensorProperties)


def _lies_beside(place: filesystem._StorageInfo) -> bool:
    return Path(place.relative_path).name == place.relative_path and not place.transform_descriptors


class IndexReader(FileSystemReader):
    """torch's reader of tensors, with the index read as above."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        index = read_index(Path(self.path))
        index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return index
