"""Bytes of stored tensors, read where they are wanted: a box of each, cast and looked at on the way.

Bytes are read with `pread` straight into the tensor that they are for: mapped files would count as memory of this
process, and a copy more would cost as much as the read.
"""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.finite import is_finite
from patchgen.runtime.checkpoint.safetensor_files import StoredTensor
from patchgen.runtime.checkpoint.tensor_sources import Box, box_shape

STAGING = 8 << 20
"""Bytes that one thread reads at most before it hands them on, where they cannot be read to their place: what is cast
is best still in the processor's cache."""
BLOCK = 4 << 20
"""Bytes that are read and then looked at before the next: no more than the processor's cache holds."""
MAX_BUFFERS = 1024
"""Pieces of memory that one read of the system may fill: IOV_MAX of Linux and macOS."""
OPEN_FILES = 8
"""Files that a thread keeps open."""
ALIGNMENT = 64
DONT_CACHE = 0x80
"""Linux' RWF_DONTCACHE (6.14 and newer): pages that a read brought into the cache leave it again."""
SHORT_RUN = 64 << 10
"""Rows shorter than this are read together with what lies between them."""


@dataclass(frozen=True, eq=False)
class _Run:
    """Bytes of a file that follow each other, and where they go.

    Attributes:
        offset: of the first byte in the file.
        values [numel]: memory of the CPU, in the dtype of the file.
        out: what the values are cast to once they are there; None if they are in their place.
    """

    stored: StoredTensor
    offset: int
    values: Tensor
    out: Tensor | None = None

    @cached_property
    def memory(self) -> memoryview:
        return self.values.view(torch.uint8).numpy().data

    @property
    def end(self) -> int:
        return self.offset + self.values.nbytes


class FileReader:
    """Reads boxes of stored tensors; may be used by several threads.

    Attributes:
        keeps_pages: False: what comes from the disk does not stay in the page cache, where the system can do that.
            Finding memory for pages that nobody reads again costs more than the disk does.
        may_be_infinite: keys of what holds bounds or masks: buffers, not weights.
        bytes_read: how many bytes were asked of the files.
    """

    def __init__(self, *, keeps_pages: bool = True, may_be_infinite: Collection[str] = ()) -> None:
        self.may_be_infinite = may_be_infinite
        self.keeps_pages = keeps_pages or sys.platform != "linux"
        self._descriptors: set[int] = set()  # of all threads
        self._lock = threading.Lock()
        self._local = threading.local()
        self.bytes_read = 0

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *error) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._local = threading.local()  # whose descriptors are closed

    def read(self, stored: StoredTensor, box: Box, out: Tensor) -> None:
        """Fills `out` (any dtype, strides and device) with a box of a stored tensor.

        Raises:
            CheckpointError: the file ends before the bytes that are asked for, or cannot be read; it holds NaN, an
                infinite value or what the dtype of `out` has no room for. Names file and key.
        """
        problem = self._read(stored, box, out).get(stored.name)
        if problem is not None:
            raise CheckpointError(problem)

    def read_in_order(self, reads: Iterable[tuple[StoredTensor, Box, Tensor]]) -> dict[str, str]:
        """As `read` for each, in the order of the files; returns what went wrong first, by key.

        What follows each other in a file is read as one, whatever tensors it is for: a system that reads ahead, or
        drops what was read, does so in units that know nothing of tensors.
        """
        problems: dict[str, str] = {}
        runs: list[_Run] = []
        staged = 0  # bytes of the staging buffer that `runs` have taken
        for stored, box, out in reads:
            place, is_one_run = _place(stored, box)
            num_bytes = out.numel() * stored.dtype.itemsize
            is_direct = _is_direct(stored, out)
            if not is_one_run or (not is_direct and num_bytes > STAGING):
                problems = self._read(stored, box, out) | problems
                continue
            follows = runs and runs[-1].stored.file == stored.file and runs[-1].end == stored.offset + place
            if runs and not (follows and (is_direct or staged + num_bytes <= STAGING)):
                problems = self._fill(runs) | problems
                runs, staged = [], 0
            if is_direct:
                runs.append(_Run(stored, stored.offset + place, _flat(out)))
            else:
                values = self._stage(STAGING, out.device)[staged : staged + num_bytes].view(stored.dtype)
                runs.append(_Run(stored, stored.offset + place, values, out))
                staged += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return self._fill(runs) | problems

    def _read(self, stored: StoredTensor, box: Box, out: Tensor, offset: int | None = None) -> dict[str, str]:
        """What went wrong, by key; `offset` is that of the tensor, if not its own."""
        if out.numel() == 0:
            return {}
        offset = stored.offset if offset is None else offset
        place, is_one_run = _place(stored, box)
        if is_one_run:
            return self._read_run(stored, offset + place, out.view(1) if out.ndim == 0 else out)
        # Rows of the first dimension: each a box of its own, or, if short, read with what lies between.
        problems: dict[str, str] = {}
        lengths, sizes = box_shape(box), stored.shape
        row_bytes = math.prod(sizes[1:]) * stored.dtype.itemsize
        wanted = math.prod(lengths[1:]) * stored.dtype.itemsize
        if lengths[0] > 1 and row_bytes <= STAGING and wanted < SHORT_RUN:
            inner = tuple(slice(*bounds) for bounds in box[1:])
            step = max(1, STAGING // row_bytes)
            for first in range(0, lengths[0], step):
                count = min(step, lengths[0] - first)
                values = self._stage(count * row_bytes, out.device).view(stored.dtype)
                run = _Run(stored, offset + (box[0][0] + first) * row_bytes, values)
                found = self._fill([run], keeps_pages=True)  # another rank may want what lies between
                if not found:
                    rows = values.view(count, *sizes[1:])[(slice(None), *inner)]
                    found = _cast(stored, rows, out[first : first + count])
                problems = found | problems
            return problems
        for row in range(lengths[0]):
            inner_tensor = StoredTensor(stored.name, stored.file, stored.dtype, sizes[1:], 0)
            found = self._read(inner_tensor, box[1:], out[row], offset + (box[0][0] + row) * row_bytes)
            problems = found | problems
        return problems

    def _read_run(self, stored: StoredTensor, offset: int, out: Tensor) -> dict[str, str]:
        if _is_direct(stored, out):
            return self._fill([_Run(stored, offset, _flat(out))])
        num_bytes = out.numel() * stored.dtype.itemsize
        if num_bytes <= STAGING:
            return self._fill([_Run(stored, offset, self._stage(num_bytes, out.device).view(stored.dtype), out)])
        row_bytes = stored.dtype.itemsize * (out[0].numel() if out.ndim > 1 else 1)
        parts = out.unbind(0) if row_bytes > STAGING else out.split(STAGING // row_bytes)
        problems: dict[str, str] = {}
        for part in parts:
            problems = self._read_run(stored, offset, part) | problems
            offset += part.numel() * stored.dtype.itemsize
        return problems

    def _stage(self, num_bytes: int, device: torch.device) -> Tensor:
        """This thread's buffer for what goes to `device`: pinned for a GPU, which then fetches it by itself."""
        kind = "pinned" if device.type == "cuda" else "plain"
        buffer = getattr(self._local, kind, None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(max(num_bytes, 1 << 20), dtype=torch.uint8, pin_memory=kind == "pinned")
            setattr(self._local, kind, buffer)
        return buffer[:num_bytes]

    def _fill(self, runs: Sequence[_Run], *, keeps_pages: bool = False) -> dict[str, str]:
        """Reads runs that follow each other in a file, block by block, and looks for NaN and infinities in the cache.

        Returns what went wrong, by key.
        """
        problems: dict[str, str] = {}
        waiting = deque(run for run in runs if run.values.numel())
        position = waiting[0].offset if waiting else 0
        while waiting:
            # Blocks end where those of the disk and of the page cache do.
            stop = (position // BLOCK + 1) * BLOCK
            block = [run for run in islice(waiting, MAX_BUFFERS) if run.offset < stop]
            views = [run.memory[max(position - run.offset, 0) : stop - run.offset] for run in block]
            first = waiting[0].stored
            try:
                descriptor = self._open(first.file)
                got = self._pread(descriptor, views, position, keeps_pages or self.keeps_pages)
                if got == 0:
                    raise EOFError(f"the file ends at byte {os.fstat(descriptor).st_size}, before the tensor does")
            except (OSError, EOFError) as error:
                problems.setdefault(first.name, f"{first.name} cannot be read from {first.file}: {error}")
                position = waiting.popleft().end
                continue
            for run in block:
                # An element that a block cuts belongs to the next one.
                start, end = (
                    max(0, place - run.offset) // run.values.itemsize for place in (position, position + got)
                )
                wrong = self._not_finite(run.stored.name, run.values[start:end])
                if wrong:
                    problems.setdefault(run.stored.name, f"{run.stored.name} in {run.stored.file} holds {wrong}.")
            position += got
            while waiting and waiting[0].end <= position:
                waiting.popleft()
        for run in runs:
            if run.out is not None and run.stored.name not in problems:
                problems |= _cast(run.stored, run.values.view(run.out.shape), run.out)
        with self._lock:
            self.bytes_read += sum(run.values.nbytes for run in runs)
        return problems

    def _not_finite(self, name: str, values: Tensor) -> str:
        """What values hold that no weight has; "" if nothing."""
        if not values.is_floating_point() or is_finite(values):
            return ""
        if bool(values.isnan().any()):
            return "NaN"
        return "" if name in self.may_be_infinite else "an infinite value"

    def _pread(self, descriptor: int, views: list[memoryview], offset: int, keeps_pages: bool) -> int:
        if not keeps_pages:
            try:
                return os.preadv(descriptor, views, offset, DONT_CACHE)
            except (OSError, NotImplementedError) as error:  # the latter: a Python built without the call
                if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self.keeps_pages = True  # an older kernel, or a file system that cannot
        return os.preadv(descriptor, views, offset)

    def _open(self, file: Path) -> int:
        """A descriptor of this thread's own, for the system reads ahead of each by itself; a few are kept."""
        mine = self._local.__dict__.setdefault("descriptors", {})
        if file not in mine:
            if len(mine) >= OPEN_FILES:
                oldest = mine.pop(next(iter(mine)))
                with self._lock:
                    self._descriptors.remove(oldest)
                os.close(oldest)
            mine[file] = os.open(file, os.O_RDONLY)
            with self._lock:
                self._descriptors.add(mine[file])
        return mine[file]


def _place(stored: StoredTensor, box: Box) -> tuple[int, bool]:
    """The first byte of a box, counted from the tensor's, and whether its bytes follow each other in the file."""
    sizes, lengths = stored.shape, box_shape(box)
    strides = [math.prod(sizes[dim + 1 :]) * stored.dtype.itemsize for dim in range(len(sizes))]
    place = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    # One run of bytes: single indices, then one range, then whole dimensions.
    first_range = next((dim for dim, length in enumerate(lengths) if length != 1), len(box))
    return place, lengths[first_range + 1 :] == tuple(sizes[first_range + 1 :])


def _is_direct(stored: StoredTensor, out: Tensor) -> bool:
    """Whether bytes of the file can be read to where they are wanted."""
    return out.is_contiguous() and out.dtype == stored.dtype and out.device.type == "cpu"


def _flat(out: Tensor) -> Tensor:
    """One element may have any stride and still count as contiguous."""
    return out.as_strided((out.numel(),), (1,))


def _cast(stored: StoredTensor, values: Tensor, out: Tensor) -> dict[str, str]:
    """Copies values that were read to where they are wanted, unless the dtype of `out` has no room for one of them.

    Returns what went wrong, by key: a finite value that would be infinite, a whole number or what is to become one that
    would be another.
    """
    lost = _without_room(values, out.dtype)
    if lost is not None:
        return {stored.name: f"{stored.name} in {stored.file} holds {lost:g}, which {out.dtype} cannot represent."}
    if values.dtype != out.dtype:
        # The device casts, and may get half the bytes. It must have them all: the next read takes the buffer again.
        values = values.to(out.device)
    out.copy_(values)
    return {}


def _without_room(values: Tensor, dtype: torch.dtype) -> float | None:
    """A value that is lost in `dtype`; None if there is none. Floating-point numbers may be rounded."""
    if values.dtype == dtype or values.numel() == 0:
        return None
    if not (dtype.is_floating_point and values.is_floating_point()):
        lost = values[values.to(dtype).to(values.dtype) != values]
    elif torch.finfo(dtype).max < torch.finfo(values.dtype).max:
        extremes = torch.stack(values.aminmax())  # one pass, over what is in the cache
        if not bool(extremes.isfinite().all()):
            extremes = torch.where(values.isfinite(), values, 0)
        lost = extremes[extremes.isfinite() & extremes.to(dtype).isinf()]
    else:
        return None
    return float(lost[0]) if lost.numel() else None
