"""The index of torch's distributed checkpoint, read without running anything.

`.metadata` is a pickle, and a pickle can run any code while it is read; torch's own reader allows that. Here only the
classes that an index consists of are allowed, and only files inside the checkpoint.
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
_GLOBALS = (
    Metadata, MetadataIndex, TensorStorageMetadata, metadata.ChunkStorageMetadata, metadata.TensorProperties,
    metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.Size, _get_layout,
)  # fmt: skip
_ALLOWED = {(part.__module__, part.__qualname__): part for part in _GLOBALS}
_ALLOWED |= {("torch", name): part for name, part in vars(torch).items() if isinstance(part, torch.dtype)}


class _IndexUnpickler(pickle.Unpickler):
    """Allows only what an index consists of."""

    def find_class(self, module: str, name: str) -> object:
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # the path it was saved to, which is not used
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in an index of tensors")
        return _ALLOWED[module, name]


def read_index(folder: Path) -> Metadata:
    """Which tensors a training checkpoint holds, and the offsets of their bytes.

    Raises:
        CheckpointError: the file is missing or damaged, names anything but plain tensors, or points outside of `folder`.
    """
    file = folder / INDEX
    try:
        with file.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
        not_tensors = [key for key, entry in index.state_dict_metadata.items() if not _is_tensor(entry)]
        outside = {info.relative_path for info in index.storage_data.values() if not _is_inside_folder(info)}
        transformed = {
            info.relative_path: info.transform_descriptors
            for info in index.storage_data.values()
            if info.transform_descriptors
        }
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{file} cannot be read: {error}. No code in it was run.") from error
    if not_tensors or outside or transformed:
        problems = [f"{key} is not a tensor" for key in not_tensors]
        problems += [f"'{path}' is outside of {folder}" for path in sorted(outside)]
        problems += [
            f"'{path}' is stored transformed ({', '.join(map(str, transforms))}), and only plain tensors are read. To fix: load "
            "it with the code that saved it, and save it without extensions of the writer"
            for path, transforms in sorted(transformed.items())
        ]
        raise CheckpointError(f"{file} cannot be read:", problems)
    return index


def _is_tensor(entry: object) -> bool:
    """Whether an entry is that of a tensor: torch unpickles the data of every other one, which may run code."""
    return isinstance(entry, TensorStorageMetadata) and isinstance(entry.properties, metadata.TensorProperties)


def _is_inside_folder(info: filesystem._StorageInfo) -> bool:
    return Path(info.relative_path).name == info.relative_path


class IndexReader(FileSystemReader):
    """torch's reader, with `read_index` for the index."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        index = read_index(Path(self.path))
        index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return index
