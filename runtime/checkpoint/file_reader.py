"""Reads regions of stored tensors into tensors in memory, casting and checking for NaN on the way.

Bytes are read with `pread` directly into the target: mapped files would count as memory of this process, and another copy
would cost as much as the read.
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
from patchgen.runtime.checkpoint.lazy_tensors import Region, region_shape
from patchgen.runtime.checkpoint.quantised_tensors import QuantisedTensor
from patchgen.runtime.checkpoint.safetensor_files import StoredTensor

STAGING_BYTES = 8 << 20
"""The most bytes that a thread reads before it casts or copies them, where they cannot be read directly to the target: they
should still be in the processor's cache."""
NUMBERS = 1 << 20
"""Numbers of a quantised tensor that are computed at a time, in fp32."""
BLOCK_BYTES = 4 << 20
"""Bytes that are read and checked at a time: they should fit into the processor's cache."""
MAX_BUFFERS = 1024
"""Buffers of one `preadv`: IOV_MAX of Linux and macOS."""
MAX_OPEN_FILES = 8
"""The most files that a thread keeps open."""
ALIGNMENT = 64
"""Bytes to which tensors are aligned in the staging buffer."""
DONT_CACHE = 0x80
"""Linux' RWF_DONTCACHE (6.14 and newer): drops the pages that a read brought into the page cache."""
SHORT_RUN_BYTES = 64 << 10
"""Parts of rows shorter than this are read together with the bytes between them."""


@dataclass(frozen=True, eq=False)
class _Run:
    """Contiguous bytes of a file, and the memory to read them into.

    Attributes:
        offset: of the first byte in the file.
        values [numel]: on the CPU, in the dtype of the file.
        out: the target that `values` are copied to, with a cast; None if `values` is the target, or the caller
            copies them.
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
    """Reads regions of stored tensors; may be used by several threads.

    Attributes:
        keeps_pages: False: what is read does not stay in the page cache, if the system supports that. Allocating pages that
            are not read again takes longer than reading from disk.
        may_be_infinite: keys of tensors that may have infinite values: buffers (bounds, masks), not weights.
        bytes_read: the number of bytes read.
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
        self._local = threading.local()  # has only closed descriptors now

    def read(self, stored: StoredTensor, region: Region, out: Tensor) -> None:
        """Fills `out` (any dtype, strides and device) with a region of a stored tensor.

        Raises:
            CheckpointError: the file is too short or cannot be read; the tensor has NaN, an infinite value or one that the
                dtype of `out` cannot represent. Names file and key.
        """
        problem = self._read(stored, region, out).get(stored.name)
        if problem is not None:
            raise CheckpointError(problem)

    def read_in_order(self, reads: Iterable[tuple[StoredTensor, Region, Tensor]]) -> dict[str, str]:
        """Like `read` for each of `reads`, which are in file order; returns the first problem of each key.

        Contiguous bytes of several tensors are read at once: the system reads ahead, and drops pages, in units that are
        independent of tensors.
        """
        problems: dict[str, str] = {}
        runs: list[_Run] = []
        staged = 0  # bytes of the staging buffer that `runs` use
        for stored, region, out in reads:
            if isinstance(stored, QuantisedTensor):
                problems = self._read_quantised(stored, region, out) | problems
                continue
            offset_in_tensor, is_one_run = _locate(stored, region)
            num_bytes = out.numel() * stored.dtype.itemsize
            is_direct = _is_direct(stored, out)
            if not is_one_run or (not is_direct and num_bytes > STAGING_BYTES):
                problems = self._read(stored, region, out) | problems
                continue
            follows = runs and runs[-1].stored.file == stored.file and runs[-1].end == stored.offset + offset_in_tensor
            if runs and not (follows and (is_direct or staged + num_bytes <= STAGING_BYTES)):
                problems = self._fill(runs) | problems
                runs, staged = [], 0
            if is_direct:
                runs.append(_Run(stored, stored.offset + offset_in_tensor, _flat(out)))
            else:
                values = self._stage(STAGING_BYTES, out.device)[staged : staged + num_bytes].view(stored.dtype)
                runs.append(_Run(stored, stored.offset + offset_in_tensor, values, out))
                staged += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return self._fill(runs) | problems

    def _read(self, stored: StoredTensor, region: Region, out: Tensor, offset: int | None = None) -> dict[str, str]:
        """Reads a region; returns the problems, by key. `offset` is the tensor's in the file, if not `stored.offset`."""
        if out.numel() == 0:
            return {}
        if isinstance(stored, QuantisedTensor):
            return self._read_quantised(stored, region, out)
        offset = stored.offset if offset is None else offset
        offset_in_tensor, is_one_run = _locate(stored, region)
        if is_one_run:
            return self._read_run(stored, offset + offset_in_tensor, out.view(1) if out.ndim == 0 else out)
        # Rows of the first dimension: read one by one, or, if they are short, together with the bytes between them.
        problems: dict[str, str] = {}
        lengths, sizes = region_shape(region), stored.shape
        row_bytes = math.prod(sizes[1:]) * stored.dtype.itemsize
        part_bytes = math.prod(lengths[1:]) * stored.dtype.itemsize
        if lengths[0] > 1 and row_bytes <= STAGING_BYTES and part_bytes < SHORT_RUN_BYTES:
            inner = tuple(slice(*bounds) for bounds in region[1:])
            step = max(1, STAGING_BYTES // row_bytes)
            for first in range(0, lengths[0], step):
                count = min(step, lengths[0] - first)
                values = self._stage(count * row_bytes, out.device).view(stored.dtype)
                run = _Run(stored, offset + (region[0][0] + first) * row_bytes, values)
                new_problems = self._fill([run], keeps_pages=True)  # another rank may read the bytes between
                if not new_problems:
                    rows = values.view(count, *sizes[1:])[(slice(None), *inner)]
                    new_problems = _cast(stored, rows, out[first : first + count])
                problems = new_problems | problems
            return problems
        for row in range(lengths[0]):
            inner_tensor = StoredTensor(stored.name, stored.file, stored.dtype, sizes[1:], 0)
            new_problems = self._read(inner_tensor, region[1:], out[row], offset + (region[0][0] + row) * row_bytes)
            problems = new_problems | problems
        return problems

    def _read_quantised(self, stored: QuantisedTensor, region: Region, out: Tensor) -> dict[str, str]:
        """Reads the parts of a region, and computes its numbers, in pieces that stay in the processor's cache; returns the problem,
        by the key of the group."""
        dim = stored.cheapest_cut(region)
        (start, stop), step = region[dim], max(1, NUMBERS // max(1, out.numel() // out.shape[dim]))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            piece = (*region[:dim], (first, last), *region[dim + 1 :])
            if problems := self._read_numbers(stored, piece, out.narrow(dim, first - start, last - first)):
                return problems
        return {}

    def _read_numbers(self, stored: QuantisedTensor, region: Region, out: Tensor) -> dict[str, str]:
        parts: list[Tensor] = []
        for part, part_region in stored.reads(region):
            parts.append(torch.empty(region_shape(part_region), dtype=part.dtype))
            if problem := self._read(part, part_region, parts[-1]).get(part.name):
                return {stored.name: problem}
        numbers = stored.numbers(region, parts)
        if not is_finite(numbers):
            return {
                stored.name: f"{stored.name} in {stored.file} holds NaN, or is infinite with {stored.scales.name}."
            }
        lost = unrepresentable(numbers, out.dtype)
        if lost is not None:
            return {stored.name: _not_representable(stored, lost, out.dtype)}
        out.copy_(numbers.to(out.dtype))  # cast here: less to send to a GPU
        return {}

    def _read_run(self, stored: StoredTensor, offset: int, out: Tensor) -> dict[str, str]:
        if _is_direct(stored, out):
            return self._fill([_Run(stored, offset, _flat(out))])
        num_bytes = out.numel() * stored.dtype.itemsize
        if num_bytes <= STAGING_BYTES:
            return self._fill([_Run(stored, offset, self._stage(num_bytes, out.device).view(stored.dtype), out)])
        row_bytes = stored.dtype.itemsize * (out[0].numel() if out.ndim > 1 else 1)
        parts = out.unbind(0) if row_bytes > STAGING_BYTES else out.split(STAGING_BYTES // row_bytes)
        problems: dict[str, str] = {}
        for part in parts:
            problems = self._read_run(stored, offset, part) | problems
            offset += part.numel() * stored.dtype.itemsize
        return problems

    def _stage(self, num_bytes: int, device: torch.device) -> Tensor:
        """This thread's staging buffer for `device`: pinned for a GPU."""
        kind = "pinned" if device.type == "cuda" else "plain"
        buffer = getattr(self._local, kind, None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(max(num_bytes, 1 << 20), dtype=torch.uint8, pin_memory=kind == "pinned")
            setattr(self._local, kind, buffer)
        return buffer[:num_bytes]

    def _fill(self, runs: Sequence[_Run], *, keeps_pages: bool = False) -> dict[str, str]:
        """Reads contiguous runs of a file, block by block, and checks each block for NaN and infinities while it is in cache.

        Returns the problems, by key.
        """
        problems: dict[str, str] = {}
        waiting = deque(run for run in runs if run.values.numel())
        position = waiting[0].offset if waiting else 0
        while waiting:
            # Blocks are aligned to those of the disk and the page cache.
            stop = (position // BLOCK_BYTES + 1) * BLOCK_BYTES
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
                # An element that is split between two blocks belongs to the second.
                start, end = (max(0, edge - run.offset) // run.values.itemsize for edge in (position, position + got))
                invalid = self._invalid_values(run.stored.name, run.values[start:end])
                if invalid:
                    problems.setdefault(run.stored.name, f"{run.stored.name} in {run.stored.file} holds {invalid}.")
            position += got
            while waiting and waiting[0].end <= position:
                waiting.popleft()
        for run in runs:
            if run.out is not None and run.stored.name not in problems:
                problems |= _cast(run.stored, run.values.view(run.out.shape), run.out)
        with self._lock:
            self.bytes_read += sum(run.values.nbytes for run in runs)
        return problems

    def _invalid_values(self, name: str, values: Tensor) -> str:
        """What the values contain that this tensor may not have, in words; "" if nothing."""
        # Numbers of one byte are parts of quantised tensors, which are checked when they are computed.
        if not values.is_floating_point() or values.dtype.itemsize == 1 or is_finite(values):
            return ""
        if bool(values.isnan().any()):
            return "NaN"
        return "" if name in self.may_be_infinite else "an infinite value"

    def _pread(self, descriptor: int, views: list[memoryview], offset: int, keeps_pages: bool) -> int:
        if not keeps_pages:
            try:
                return os.preadv(descriptor, views, offset, DONT_CACHE)
            except (OSError, NotImplementedError) as error:  # NotImplementedError: a Python built without preadv2
                if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self.keeps_pages = True  # an older kernel, or a file system without support
        return os.preadv(descriptor, views, offset)

    def _open(self, file: Path) -> int:
        """A descriptor of this thread, because the system reads ahead per descriptor; a few are kept open."""
        descriptors = self._local.__dict__.setdefault("descriptors", {})
        if file not in descriptors:
            if len(descriptors) >= MAX_OPEN_FILES:
                oldest = descriptors.pop(next(iter(descriptors)))
                with self._lock:
                    self._descriptors.remove(oldest)
                os.close(oldest)
            descriptors[file] = os.open(file, os.O_RDONLY)
            with self._lock:
                self._descriptors.add(descriptors[file])
        return descriptors[file]


def _locate(stored: StoredTensor, region: Region) -> tuple[int, bool]:
    """The offset of a region in the tensor's bytes, and whether the region is contiguous in the file."""
    sizes, lengths = stored.shape, region_shape(region)
    strides = [math.prod(sizes[dim + 1 :]) * stored.dtype.itemsize for dim in range(len(sizes))]
    offset_in_tensor = sum(start * stride for (start, _), stride in zip(region, strides, strict=True))
    # Contiguous: single indices, then one range, then full dimensions.
    first_range = next((dim for dim, length in enumerate(lengths) if length != 1), len(region))
    return offset_in_tensor, lengths[first_range + 1 :] == tuple(sizes[first_range + 1 :])


def _is_direct(stored: StoredTensor, out: Tensor) -> bool:
    """Whether the bytes of the file can be read directly into the target."""
    return out.is_contiguous() and out.dtype == stored.dtype and out.device.type == "cpu"


def _flat(out: Tensor) -> Tensor:
    """A flat view; `view(-1)` would refuse a single element with another stride."""
    return out.as_strided((out.numel(),), (1,))


def _cast(stored: StoredTensor, values: Tensor, out: Tensor) -> dict[str, str]:
    """Copies values to `out`, unless its dtype cannot represent one of them.

    Returns the problem, by key: a finite value that would become infinite, an integer that would change, or a value that a
    cast to an integer would change.
    """
    lost = unrepresentable(values, out.dtype)
    if lost is not None:
        return {stored.name: _not_representable(stored, lost, out.dtype)}
    if values.dtype != out.dtype:
        # Cast on the device, which may mean half the transfer. Synchronous, because the next read reuses the buffer.
        values = values.to(out.device)
    out.copy_(values)
    return {}


def _not_representable(stored: StoredTensor, value: float, dtype: torch.dtype) -> str:
    return f"{stored.name} in {stored.file} holds {value:g}, which {dtype} cannot represent."


def unrepresentable(values: Tensor, dtype: torch.dtype) -> float | None:
    """A value that `dtype` cannot represent; None if there is none. Floating-point numbers may be rounded."""
    if values.dtype == dtype or values.numel() == 0:
        return None
    if not (dtype.is_floating_point and values.is_floating_point()):
        lost = values[values.to(dtype).to(values.dtype) != values]
    elif torch.finfo(dtype).max < torch.finfo(values.dtype).max:
        extremes = torch.stack(values.aminmax())  # one pass
        if not bool(extremes.isfinite().all()):
            extremes = torch.where(values.isfinite(), values, 0)
        lost = extremes[extremes.isfinite() & extremes.to(dtype).isinf()]
    else:
        return None
    return float(lost[0]) if lost.numel() else None
