"""The small files of a checkpoint: what ranks keep for themselves and share, in torch's format without code."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from patchgen.runtime.checkpoint.errors import CheckpointError


class RankStates(Sequence):
    """The own `extra_state` of every rank of a saved run, read when it is asked for: of a thousand, one uses its own."""

    def __init__(self, folder: Path, world: int) -> None:
        self._folder, self._world = folder, world
        self._read: dict[int, dict] = {}

    def __len__(self) -> int:
        return self._world

    def __getitem__(self, place: int) -> dict:
        return self.whole(range(self._world)[place])["extra"]

    def whole(self, rank: int) -> dict:
        """All that a rank kept."""
        if rank not in self._read:
            file = self._folder / rank_file(rank)
            self._read[rank] = torch.load(file, weights_only=True, map_location="cpu")
        return self._read[rank]


def rank_file(rank: int) -> str:
    """The name of what a rank keeps."""
    return f"rank-{rank:05d}.pt"


def plain_bytes(value: object, what: str) -> bytes:
    """The value in torch's format, after a check that it can be read without running code."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{what} must hold plain values and tensors only (numbers, strings, lists, dicts): {error}"
        ) from error
    return stream.getvalue()


def write_file(file: Path, data: bytes) -> None:
    """Writes a file and waits until its bytes are on the disk."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def free_space(folder: Path) -> str:
    """How much the disk of a folder, which need not be there yet, still takes: for messages."""
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return f"{shutil.disk_usage(existing).free / 1e9:.2f} GB free there"
