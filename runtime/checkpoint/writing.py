"""Sharded safetensors files with their index, written tensor by tensor, each file by one rank.

plan       which tensor goes to which file, and who writes it: the same on every rank
write      every file under a temporary name, then, if all ranks succeeded, all of them under their own

While files are put in place the folder has no config, no index and a file `.incomplete`, so that what a killed process
leaves is taken for a checkpoint by nobody.
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
from patchgen.runtime.checkpoint.placement import FAILURES, Result, world
from patchgen.runtime.checkpoint.safetensor_files import CONFIG, DTYPE_NAMES, INCOMPLETE, INDEX, SINGLE, WEIGHTS
from patchgen.runtime.checkpoint.tensor_sources import Moved
from patchgen.runtime.parallel.collectives import gather_objects

MAX_FILE = 5_000_000_000
"""Bytes of a file, if no tensor alone is larger."""


@dataclass(frozen=True)
class Output:
    """One tensor to write: `moved` says what it is made of, `dtype` what it is stored as."""

    name: str
    moved: Moved
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.moved.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ReadOutput(Output):
    """A tensor that knows by itself how it is read; `moved` has its shape."""

    def read(self, reader: FileReader) -> Tensor:
        """The tensor, on the CPU.

        Raises:
            CheckpointError: naming file and key.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class PlannedFile:
    """A file, what is in it in order, and the rank that writes it."""

    name: str
    outputs: tuple[Output, ...]
    writer: int


def plan(outputs: Iterable[Output], *, max_file: int = MAX_FILE) -> list[PlannedFile]:
    """Divides tensors over files and files over ranks.

    Raises:
        CheckpointError: a dtype that safetensors has no name for.
    """
    groups: list[list[Output]] = [[]]
    size = 0
    for output in sorted(outputs, key=lambda output: dot_natural_key(output.name)):
        if output.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{output.name} is {output.dtype}, a dtype that is not written to safetensors here.")
        if groups[-1] and size + output.num_bytes > max_file:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.num_bytes
    _, ranks = world()
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return [PlannedFile(names[i], tuple(group), i % ranks) for i, group in enumerate(groups)]


def _partial(file: Path) -> Path:
    """The name of a file that is not complete."""
    return file.with_name(f".{file.name}.partial")


class FileWriter:
    """Writes one safetensors file, tensor by tensor in the order of its header, under a temporary name."""

    def __init__(self, file: Path, outputs: Iterable[Output]) -> None:
        self.file, self._temporary = file, _partial(file)
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for output in outputs:
            start, end = end, end + output.num_bytes
            shape = list(output.moved.shape)
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
            with contextlib.suppress(OSError):  # there may be no such file, nor folder
                self._temporary.unlink()
            raise CheckpointError(f"{file} cannot be written: {error}") from error

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends the next tensor (contiguous, on the CPU)."""
        try:
            self._stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be written to {self.file}: {error}") from error

    def finish(self) -> None:
        """Waits until the bytes are on the disk."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be written: {error}") from error

    def place(self) -> None:
        """Gives the file its name."""
        self._temporary.replace(self.file)

    def abandon(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError):  # closing flushes, and may fail as the write did
            self._stream.close()
        self._temporary.unlink(missing_ok=True)


class FolderWriter:
    """This rank's files of a planned checkpoint. A failure is kept until `close`, so that no rank waits for another."""

    def __init__(self, directory: Path, files: Iterable[PlannedFile]) -> None:
        self.directory, self._files = directory, list(files)
        self._error = ""
        rank, _ = world()
        self._mine = {file.name: file for file in self._files if file.writer == rank}
        self._finished: list[FileWriter] = []
        self._open: FileWriter | None = None
        self._of = {output.name: file for file in self._mine.values() for output in file.outputs}
        self.attempt(self._make_folder)

    def _make_folder(self) -> None:
        if is_training_checkpoint(self.directory):
            raise CheckpointError("it is a training checkpoint, which would be damaged: give another folder")
        self.directory.mkdir(parents=True, exist_ok=True)

    def write(self, output: Output, tensor: Tensor) -> None:
        """Writes the next tensor of this rank's files; tensors come in the order of the plan."""
        file = self._of[output.name]

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
        """Does something that this rank's files need; None, and the error kept, if it fails or something did before."""
        if self._error:
            return None
        try:
            return work()
        except FAILURES as error:  # whatever it is, the other ranks must hear of it: they would wait
            self._error = str(error) if isinstance(error, CheckpointError | OSError) else repr(error)
            return None

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not write something: the others need not know yet."""
        return bool(self._error)

    def close(self, others: Mapping[str, str | Path]) -> None:
        """Writes index and further files, then puts all in place, and removes what an earlier checkpoint left there.

        Every rank calls it.

        Args:
            others: further files, name -> text or the file to copy; rank 0 writes them.

        Raises:
            CheckpointError: on every rank, if a file could not be written on any: then none is replaced; or could not
                be put in place: then the folder is marked as incomplete.
        """
        rank, _ = world()
        prepared: list[Path] = []
        if rank == 0:
            self.attempt(lambda: self._prepare(others, prepared))
        try:
            self._agree(self._error, "what was there before is as it was")
        except CheckpointError:
            self.abandon(prepared)
            raise
        lost = f"it holds no complete checkpoint any more ({INCOMPLETE} marks it). Write it again"
        if rank == 0:
            self.attempt(lambda: self._invalidate(prepared))
        self._agree(self._error, lost)
        self.attempt(lambda: [writer.place() for writer in self._finished])
        self._agree(self._error, lost)
        if rank == 0:
            self.attempt(lambda: self._complete(prepared))
        self._agree(self._error, lost)

    def abandon(self, prepared: Iterable[Path] = ()) -> None:
        """Removes what this rank wrote under temporary names."""
        for writer in [*self._finished, *([self._open] if self._open else [])]:
            writer.abandon()
        for file in prepared:
            _partial(file).unlink(missing_ok=True)

    def _invalidate(self, prepared: Iterable[Path]) -> None:
        """Marks the folder, and takes away what makes an earlier checkpoint there one."""
        (self.directory / INCOMPLETE).write_text("Files of this folder were being replaced: do not load it.\n")
        replaced = {file.name for file in prepared}
        for name in (INDEX, SINGLE, *({CONFIG} & replaced)):
            (self.directory / name).unlink(missing_ok=True)
        sync_folder(self.directory)

    def _complete(self, prepared: Iterable[Path]) -> None:
        """Puts in place all but the weights, index and config last, and removes the mark."""
        self._remove_stale()
        for file in sorted(prepared, key=lambda file: file.name in (INDEX, CONFIG)):
            _partial(file).replace(file)
        sync_folder(self.directory)
        (self.directory / INCOMPLETE).unlink()

    def _prepare(self, others: Mapping[str, str | Path], prepared: list[Path]) -> None:
        """Writes all but the weights under temporary names."""
        files = dict(others)
        if len(self._files) > 1:
            sizes = [output.num_bytes for file in self._files for output in file.outputs]
            weight_map = {output.name: file.name for file in self._files for output in file.outputs}
            files[INDEX] = json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}, indent=2)
        for name, content in files.items():
            file = self.directory / name
            prepared.append(file)
            if isinstance(content, Path):
                shutil.copyfile(content, _partial(file))
            else:
                _partial(file).write_text(content)

    def _remove_stale(self) -> None:
        """Weights of an earlier checkpoint, which would be read with these; files of other names are not ours."""
        names = {file.name for file in self._files}
        for stale in self.directory.glob("model*.safetensors"):
            if stale.name not in names and WEIGHTS.fullmatch(stale.name):
                stale.unlink()

    def _agree(self, error: str, state: str) -> None:
        errors = gather_objects(error)
        if any(errors):
            told = [f"rank {rank}: {text}" if len(errors) > 1 else text for rank, text in enumerate(errors) if text]
            raise CheckpointError(f"{self.directory} could not be written; {state}:", told)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
