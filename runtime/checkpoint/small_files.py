"""The small files of a checkpoint: per-rank and shared state, in torch's format and loadable with `weights_only`."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from patchgen.runtime.checkpoint.errors import CheckpointError


class RankStates(Sequence):
    """`extra_state["rank"]` of every rank of a saved run, each read on access: a rank usually needs only its own."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._folder, self._num_ranks = folder, num_ranks
        self._loaded: dict[int, dict] = {}

    def __len__(self) -> int:
        return self._num_ranks

    def __getitem__(self, index: int) -> dict:
        return self.state_of(range(self._num_ranks)[index])["extra"]

    def state_of(self, rank: int) -> dict:
        """The content of a rank's file."""
        if rank not in self._loaded:
            file = self._folder / rank_file(rank)
            self._loaded[rank] = torch.load(file, weights_only=True, map_location="cpu")
        return self._loaded[rank]


def rank_file(rank: int) -> str:
    """The name of the file with a rank's own state."""
    return f"rank-{rank:05d}.pt"


def serialise(value: object, what: str) -> bytes:
    """The value in torch's format, after a check that it loads with `weights_only`; `what` names it in the error."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{what} must contain only tensors and plain values (numbers, strings, lists, dicts): {error}"
        ) from error
    return stream.getvalue()


def write_file(file: Path, data: bytes) -> None:
    """Writes a file and syncs it to disk."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def free_space(folder: Path) -> str:
    """The free space of the disk of a folder, which need not exist yet, for messages."""
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return f"{shutil.disk_usage(existing).free / 1e9:.2f} GB free there"
