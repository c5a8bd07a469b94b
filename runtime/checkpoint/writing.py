"""Writes sharded safetensors files and their index, tensor by tensor, each file on one rank.

plan       which tensor goes to which file, and which rank writes it: the same on every rank
write      every file under a temporary name; if all ranks succeed, all are renamed

While files are renamed, the folder has no config, no index and a file `.incomplete`, so that nothing mistakes what a killed
process leaves for a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.core_model_loading import dot_natural_key

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.folders import is_training_checkpoint
from patchgen.runtime.checkpoint.lazy_tensors import LazyTensor
from patchgen.runtime.checkpoint.placement import FAILURES, Result, rank_and_world_size
from patchgen.runtime.checkpoint.safetensor_files import (
    CONFIG,
    DTYPE_NAMES,
    EXPLICIT,
    INCOMPLETE,
    INDEX,
    SINGLE,
    WEIGHTS,
)
from patchgen.runtime.parallel.collectives import gather_objects

MAX_FILE = 5_000_000_000
"""Bytes of a file, unless a single tensor is larger."""


@dataclass(frozen=True)
class Output:
    """One tensor to write, and the dtype to store it in."""

    name: str
    tensor: LazyTensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.tensor.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ReadableOutput(Output):
    """A tensor that is read by its own method `read`, not by the read plan of `tensor` alone."""

    def read(self, reader: FileReader) -> Tensor:
        """The tensor, on the CPU.

        Raises:
            CheckpointError: naming file and key.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class PlannedFile:
    """A file, its tensors in order, and the rank that writes it."""

    name: str
    outputs: tuple[Output, ...]
    writer: int


def plan_files(outputs: Iterable[Output], *, max_file: int = MAX_FILE) -> list[PlannedFile]:
    """Assigns tensors to files and files to ranks.

    Raises:
        CheckpointError: a dtype that safetensors does not support.
    """
    groups: list[list[Output]] = [[]]
    size = 0
    for output in sorted(outputs, key=lambda output: dot_natural_key(output.name)):
        if output.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{output.name} is {output.dtype}, a dtype that cannot be written to safetensors.")
        if groups[-1] and size + output.num_bytes > max_file:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.num_bytes
    _, ranks = rank_and_world_size()
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return [PlannedFile(names[i], tuple(group), i % ranks) for i, group in enumerate(groups)]


def _partial(file: Path) -> Path:
    """The temporary name of a file."""
    return file.with_name(f".{file.name}.partial")


class FileWriter:
    """Writes one safetensors file, tensor by tensor in the order of its header, under a temporary name."""

    def __init__(self, file: Path, outputs: Iterable[Output]) -> None:
        self.file, self._temporary = file, _partial(file)
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for output in outputs:
            start, end = end, end + output.num_bytes
            shape = list(output.tensor.shape)
            header[output.name] = {
                "dtype": DTYPE_NAMES[output.dtype], "shape": shape, "data_offsets": [start, end],
            }  # fmt: skip
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        try:
            self._stream = self._temporary.open("wb")
            self._stream.write(len(text).to_bytes(8, "little") + text)
            self._stream.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # the file or its folder may not exist
                self._temporary.unlink()
            raise CheckpointError(f"{file} cannot be written: {error}") from error

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends the next tensor (contiguous, on the CPU)."""
        try:
            self._stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be written to {self.file}: {error}") from error

    def finish(self) -> None:
        """Syncs the file to disk and closes it."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be written: {error}") from error

    def rename(self) -> None:
        """Gives the file its final name."""
        self._temporary.replace(self.file)

    def abandon(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError):  # closing flushes, which may fail
            self._stream.close()
        self._temporary.unlink(missing_ok=True)


class FolderWriter:
    """This rank's files of a planned checkpoint. Errors are kept until `close`, so that no rank waits for another."""

    def __init__(self, directory: Path, files: Iterable[PlannedFile]) -> None:
        self.directory, self._files = directory, list(files)
        self._error = ""
        rank, _ = rank_and_world_size()
        self._own_files = {file.name: file for file in self._files if file.writer == rank}
        self._finished: list[FileWriter] = []
        self._open: FileWriter | None = None
        self._file_of = {output.name: file for file in self._own_files.values() for output in file.outputs}
        self.attempt(self._make_folder)

    def _make_folder(self) -> None:
        if is_training_checkpoint(self.directory):
            raise CheckpointError("it is a training checkpoint, which this would damage: give another folder")
        self.directory.mkdir(parents=True, exist_ok=True)

    def write(self, output: Output, tensor: Tensor) -> None:
        """Writes the next tensor of this rank's files, in the order of the plan."""
        file = self._file_of[output.name]

        def append() -> None:
            if self._open is None:
                self._open = FileWriter(self.directory / file.name, file.outputs)
            self._open.write(output.name, tensor)
            if file.outputs[-1] is output:
                self._open.finish()
                self._finished.append(self._open)
                self._open = None

        self.attempt(append)

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """Runs `work` unless something failed before; None if it fails, with the error kept."""
        if self._error:
            return None
        try:
            return work()
        except FAILURES as error:  # of any kind: `close` raises it on all ranks
            self._error = str(error) if isinstance(error, CheckpointError | OSError) else repr(error)
            return None

    @property
    def has_failed(self) -> bool:
        """Whether anything failed on this rank; other ranks may not know yet."""
        return bool(self._error)

    def close(self, other_files: Mapping[str, str | Path]) -> None:
        """Writes index and other files, renames all, and removes files of an earlier checkpoint. Collective.

        Args:
            other_files: name -> text or the file to copy; rank 0 writes them.

        Raises:
            CheckpointError: on every rank, if a file could not be written on any, and then nothing is replaced; or could
                not be renamed, and then the folder is marked as incomplete.
        """
        rank, _ = rank_and_world_size()
        prepared: list[Path] = []
        unchanged = "its earlier content is unchanged"
        lost = f"it no longer holds a complete checkpoint ({INCOMPLETE} marks it). Write it again"
        phases: list[tuple[bool, Callable[[], object], str]] = [
            (rank == 0, lambda: self._prepare(other_files, prepared), unchanged),
            (rank == 0, self._mark_incomplete, unchanged),
            (rank == 0, lambda: self._invalidate(prepared), lost),
            (True, lambda: [writer.rename() for writer in self._finished], lost),
            (rank == 0, lambda: self._complete(prepared), lost),
        ]
        try:
            for is_mine, work, state in phases:
                if is_mine:
                    self.attempt(work)
                self._raise_errors(state)
        except CheckpointError:
            self.abandon(prepared)
            raise

    def abandon(self, prepared: Iterable[Path] = ()) -> None:
        """Removes this rank's temporary files."""
        for writer in [*self._finished, *([self._open] if self._open else [])]:
            writer.abandon()
        for file in prepared:
            _partial(file).unlink(missing_ok=True)

    def _mark_incomplete(self) -> None:
        """Marks the folder as incomplete; if that fails, it is not marked."""
        marker = self.directory / INCOMPLETE
        if marker.is_file():  # of an earlier write that was interrupted
            return
        try:
            marker.write_text("Files of this folder were being replaced: do not load it.\n")
        except OSError:  # on a full disk it exists without its text
            marker.unlink(missing_ok=True)
            raise

    def _invalidate(self, prepared: Iterable[Path]) -> None:
        """Removes an earlier index, single file and, if it will be replaced, config."""
        replaced = {file.name for file in prepared}
        for name in (INDEX, SINGLE, *({CONFIG} & replaced)):
            (self.directory / name).unlink(missing_ok=True)
        sync_folder(self.directory)

    def _complete(self, prepared: Iterable[Path]) -> None:
        """Renames all files except the weights, index and config last, and removes the marker."""
        self._remove_stale()
        for file in sorted(prepared, key=lambda file: file.name in (INDEX, CONFIG)):
            _partial(file).replace(file)
        sync_folder(self.directory)
        (self.directory / INCOMPLETE).unlink()

    def _prepare(self, other_files: Mapping[str, str | Path], prepared: list[Path]) -> None:
        """Writes all files except the weights, under temporary names."""
        files = dict(other_files)
        if len(self._files) > 1:
            sizes = [output.num_bytes for file in self._files for output in file.outputs]
            weight_map = {output.name: file.name for file in self._files for output in file.outputs}
            files[INDEX] = json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}, indent=2)
        if CONFIG in files:
            files[CONFIG] = _naming_no_file(files[CONFIG])
        for name, content in files.items():
            file = self.directory / name
            prepared.append(file)
            if isinstance(content, Path):
                shutil.copyfile(content, _partial(file))
            else:
                _partial(file).write_text(content)

    def _remove_stale(self) -> None:
        """Removes weights of an earlier checkpoint, which would be loaded as well; files with other names stay."""
        names = {file.name for file in self._files}
        for stale in self.directory.glob("model*.safetensors"):
            if stale.name not in names and WEIGHTS.fullmatch(stale.name):
                stale.unlink()

    def _raise_errors(self, state: str) -> None:
        """Raises the errors of all ranks, if there are any. Collective."""
        errors = gather_objects(self._error)
        if any(errors):
            problems = [
                f"rank {rank}: {text}" if len(errors) > 1 else text for rank, text in enumerate(errors) if text
            ]
            raise CheckpointError(f"{self.directory} could not be written; {state}:", problems)


def _naming_no_file(config: str | Path) -> str | Path:
    """A config.json without the name of the file that weights are read from, which is that of the files it came with."""
    text = config.read_text(encoding="utf-8") if isinstance(config, Path) else config
    fields = json.loads(text)
    if EXPLICIT not in fields:
        return config
    return (
        json.dumps({key: value for key, value in fields.items() if key != EXPLICIT}, indent=2, ensure_ascii=False)
        + "\n"
    )


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
