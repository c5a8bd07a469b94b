"""Memory that the ranks of one machine read from each other directly, in place of collectives that send it.

    published = buffers.publish([(0, tokens), (offset, index)])    writes this rank's bytes
    kernels read published.addresses                               all ranks' bytes; on a GPU from `publish` on in stream order

The CPU processes tell each other the sizes (`exchange_counts`), which no process has to read from a device.

On GPUs it is torch's symmetric memory, accessed by pointer over NVLink or PCIe, without multicast. On CPUs it is files that
all processes map, so that the same code runs on gloo ranks.

A rank alternates between two buffers, with a barrier after each write. Before it writes a buffer again it has passed the
barrier of the other buffer, which every rank enters after its last read of this one: one barrier per exchange is enough.

    rank 0    write A | barrier | read A | write B | barrier | read B | write A ...
    rank 1    write A | barrier | read A ........ | write B | barrier ...

Pushed sums (`next_buffers`) are written into the buffers of other ranks before the barrier. A rank that pushes into B has
waited for the previous exchange, in A, whose barrier every rank entered after its last read of B.

    rank 0    write A | barrier | read A | push into B of all | barrier | read own B | write A ...

A layer has four exchanges in a step: tokens with their routing, sums, gradients of sums, gradients of tokens. In evaluation it
has the first two. Prefetched tokens are one more, apart from their routing. A replayed graph always begins on the same buffer,
so a capture needs an even number of exchanges (`replayable`).
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import socket
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from patchgen.kernels.packages import failed_import
from patchgen.kernels.peers.published import Published, TokenCounts
from patchgen.runtime.failures import is_machine_failure
from patchgen.runtime.parallel import watch
from patchgen.runtime.parallel.collectives import gather_objects

ExpertExchange = Literal["auto", "all_to_all", "peer_memory"]
ShardExchange = Literal["auto", "collectives", "peer_memory"]
Shared = TypeVar("Shared")

_MEASURED_RANKS = 4
"""Largest group in which peer memory was benchmarked against collectives on GPUs: "auto" uses it up to this size."""

ALIGNMENT = 256  # bytes
_SIZE_STEP = 2**20  # bytes: sizes are rounded up to this, after adding an eighth for longer rows


def expert_buffers(mesh: DeviceMesh, exchange: ExpertExchange, *, has_capacity: bool) -> PeerBuffers | None:
    """The buffers of this rank's EP group, or None where tokens travel by all-to-all; every rank must call it.

    Args:
        mesh: the expert mesh, with `ep` as last dimension.
        exchange: "auto" is peer memory between GPUs that support it, in groups of up to `_MEASURED_RANKS`.
        has_capacity: whether what a rank sends is bounded and the rest dropped, which only all-to-all does.

    Raises:
        ValueError: peer memory was requested but is unavailable; the message says why.
    """
    if exchange not in ("auto", "all_to_all", "peer_memory"):
        raise ValueError(f"expert_exchange must be 'auto', 'all_to_all' or 'peer_memory', not {exchange!r}.")
    num_ranks = mesh["ep"].size()
    if exchange == "all_to_all" or num_ranks == 1:
        return None
    if exchange == "auto" and (mesh.device_type != "cuda" or num_ranks > _MEASURED_RANKS):
        return None
    buffers, reason = None, "expert_capacity bounds the rows of an all-to-all."
    if not has_capacity:
        reason = _group_error(mesh)
    if reason is None:
        buffers, reason = _try_to_allocate_shared(mesh)
    if reason is not None and exchange != "auto":
        raise ValueError(f"expert_exchange='peer_memory' is unavailable: {reason} Use 'all_to_all'.")
    return buffers


def _try_to_allocate_shared(mesh: DeviceMesh) -> tuple[PeerBuffers | None, str | None]:
    """The buffers, small at first, or why some rank could not create them; the same outcome on every rank."""
    groups = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
    host_group: dist.ProcessGroup | None = None
    for ranks in groups:  # every rank takes part in creating every group
        group = dist.new_group(ranks, backend="gloo")
        host_group = group if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks else host_group
    if host_group is None:
        raise ValueError(f"Rank {dist.get_rank()} is in no group of {mesh}.")

    def allocate() -> PeerBuffers:
        buffers = PeerBuffers(mesh.get_group("ep"), host_group, _device(mesh))
        buffers.reserve(1)
        return buffers

    buffers, reason = _try_to_share(allocate)
    if reason is not None:
        warnings.warn(f"Experts' tokens travel by all-to-all: {reason}", stacklevel=2)
    return buffers, reason


def shards_use_collectives(mesh: DeviceMesh, exchange: ShardExchange) -> bool:
    """Whether shards use collectives instead; every rank of all groups must call it, and gets the same answer.

    Args:
        mesh: the one-dimensional mesh of the shards.
        exchange: "auto" is peer memory between GPUs that support it, in groups of up to `_MEASURED_RANKS`.

    Raises:
        ValueError: peer memory was requested but is unavailable; the message says why.
    """
    if exchange == "auto" and (mesh.device_type != "cuda" or mesh.size() > _MEASURED_RANKS):
        return True
    reason = _group_error(mesh)
    if reason is None:
        _, reason = _try_to_share(lambda: allocate_shared(_SIZE_STEP, mesh.get_group(), _device(mesh)))
    if reason is not None and exchange != "auto":
        raise ValueError(f"shard_exchange='peer_memory' is unavailable: {reason} Use 'collectives'.")
    if reason is not None:
        warnings.warn(f"Shards are gathered by collectives: {reason}", stacklevel=2)
    return reason is not None


def _try_to_share(allocate: Callable[[], Shared]) -> tuple[Shared | None, str | None]:
    """What `allocate` returns, or why it failed on some rank; the same outcome on every rank.

    Raises:
        RuntimeError: the device or other ranks failed, which says nothing about sharing.
    """
    shared, error = None, None
    try:
        shared = allocate()
    except (RuntimeError, OSError) as refused:  # what drivers and containers allow is only known after trying
        error = refused
    everyone = gather_objects(None if error is None else (str(error), is_machine_failure(error)))
    found = [(rank, *of_rank) for rank, of_rank in enumerate(everyone) if of_rank is not None]
    if error is not None and is_machine_failure(error):
        raise error
    if (failed := next(((rank, text) for rank, text, is_fatal in found if is_fatal), None)) is not None:
        raise RuntimeError(f"Rank {failed[0]} failed while ranks were to share memory: {failed[1]}")
    if found:
        return None, f"rank {found[0][0]} could not share memory ({found[0][1]})."
    return shared, None


def _group_error(mesh: DeviceMesh) -> str | None:
    """Why the ranks of some group along the last dimension cannot read each other's memory; the same answer on every rank."""
    hosts, errors = zip(*gather_objects((socket.gethostname(), _device_error(mesh))), strict=True)
    error = next((error for error in errors if error is not None), None)
    for ranks in mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist():
        group_hosts = sorted({hosts[rank] for rank in ranks})
        if len(group_hosts) > 1:
            error = f"ranks {ranks} run on several machines ({', '.join(group_hosts)})."
    return next((error for error in gather_objects(error) if error is not None), None)


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _device_error(mesh: DeviceMesh) -> str | None:
    """Why this rank cannot read the memory of the others of this machine; None if it can. The kernels that do are Triton's."""
    if (failure := failed_import("triton")) is not None:
        return f"rank {dist.get_rank()} cannot import Triton, in which reading kernels are written ({failure})."
    if mesh.device_type != "cuda":
        return None
    device = torch.cuda.current_device()
    for other in range(torch.cuda.device_count()):
        if other != device and not torch.cuda.can_device_access_peer(device, other):
            return f"GPU {device} has no access to the memory of GPU {other}."
    return None


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PeerBuffers:
    """Two alternating buffers of each rank of a group; every rank makes the same calls in the same order.

    Args:
        group: the ranks that read from each other, all on one machine.
        host_group: a gloo group of the same ranks, for what their CPU processes tell each other.
        device: of the buffers.

    Attributes:
        num_bytes: of each of the two buffers; 0 before the first `reserve`.
    """

    def __init__(self, group: dist.ProcessGroup, host_group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.host_group, self.device = group, host_group, device
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.num_bytes = 0
        self._memory: Memory | None = None
        self._buffers: list[Published] = []
        self._num_exchanges, self._is_open = 0, False  # open: from `next_buffers` to the barrier
        # High priority, because other ranks wait for it.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # The layers of a step have the same counts: their copy on the device is made once.
        self._cached_token_counts = functools.lru_cache(maxsize=1024)(self._token_counts)
        self._numbers = _SharedNumbers(host_group)

    def exchange_counts(self, count: int) -> TokenCounts:
        """The number of tokens of each rank, exchanged by the ranks' CPU processes without waiting for a device."""
        with watch.operation("exchange token counts with the other ranks of the machine"):
            return self._cached_token_counts(*self._numbers.exchange(count))

    def all_true(self, value: bool) -> bool:
        """Whether `value` is true on every rank, exchanged by the ranks' CPU processes without waiting for a device."""
        with watch.operation("agree with the other ranks of the machine on how tokens are sent"):
            return all(self._numbers.exchange(int(value)))

    def _token_counts(self, *counts: int) -> TokenCounts:
        """The token counts of all ranks, in rank order, with the sums of those before each rank on the device."""
        starts = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
        if self.device.type == "cuda":  # a copy from pageable memory would wait for the device
            starts = starts.pin_memory().to(self.device, non_blocking=True)
        return TokenCounts(counts, starts)

    def reserve(self, num_bytes: int) -> None:
        """Grows each buffer to at least `num_bytes`, the same on every rank; waits for the device if they grow."""
        if num_bytes <= self.num_bytes:
            return
        size = -(-(num_bytes + num_bytes // 8) // _SIZE_STEP) * _SIZE_STEP
        with watch.operation("enlarge the buffers that the ranks of the machine read from each other"):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the last reads of the old buffers
            dist.barrier(self.host_group)
            self._buffers, self._memory = [], None
            make = _SymmetricMemory if self.device.type == "cuda" else _SharedFiles
            self._memory = make(2 * size, self.group, self.host_group, self.device)
            self._buffers = [self._memory.published(turn * size, size) for turn in range(2)]
        self.num_bytes = size

    def next_buffers(self) -> Published:
        """The ranks' next buffers; after waiting for the last exchange a rank may write to any of them, until `publish`.

        Raises:
            RuntimeError: the previous exchange did not end.
        """
        if self._is_open:
            raise RuntimeError(
                f"Rank {self.rank} of the group expected that exchange {self._num_exchanges} of experts' tokens had ended, but an "
                "earlier error interrupted it: the contents and the order of the buffers are unknown. To fix: fix the earlier "
                "error, and create a new ParallelState on all ranks, or restart them."
            )
        self._num_exchanges, self._is_open = self._num_exchanges + 1, True
        self._buffers.reverse()
        return self._buffers[0]

    def publish(self, parts: Sequence[tuple[int, Tensor]], buffers: Published | None = None) -> Published:
        """Writes tensors at byte offsets of this rank's next buffer; returns all ranks' buffers once they are written.

        On a GPU in the order of the current stream.

        Args:
            buffers: those of `next_buffers`, if it was called for this exchange.
        """
        if self._memory is None:
            raise RuntimeError("There is no memory to publish in. To fix: call `reserve` first.")
        published = self.next_buffers() if buffers is None else buffers
        for offset, tensor in parts:
            published.read(self.rank, offset, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        self._memory.barrier()
        self._is_open = False
        return published

    @contextlib.contextmanager
    def replayable(self) -> Iterator[None]:
        """Makes what the block launches replayable as a graph: adds an exchange if the block has an odd number of them."""
        before = self._num_exchanges
        yield
        if (self._num_exchanges - before) % 2:
            with self.side_stream():
                self.publish([])
            self.wait()

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Runs the block on the side stream, after earlier launches; `wait` synchronises. On CPUs it runs synchronously."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Makes later launches wait for the side stream; the CPU process does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)


_ALLOCATIONS: weakref.WeakSet[_SymmetricMemory] = weakref.WeakSet()


def shared_gpu_bytes() -> int:
    """Bytes of this rank's GPU memory that other ranks read, which torch's statistics do not include."""
    return sum(memory.num_bytes for memory in _ALLOCATIONS)


class Memory:
    """Memory of each rank of a group, `parts`, that all of them read and write."""

    parts: list[Tensor]

    def published(self, offset: int, size: int) -> Published:
        parts = tuple(part[offset : offset + size] for part in self.parts)
        return Published(parts, torch.tensor([part.data_ptr() for part in parts], device=parts[0].device))

    def barrier(self, channel: int = 0) -> None:
        """A barrier of the group; on GPUs in stream order, where those of different channels may overlap."""
        raise NotImplementedError


class _SymmetricMemory(Memory):
    """torch's symmetric memory on GPUs of one machine."""

    def __init__(
        self, num_bytes: int, group: dist.ProcessGroup, _host_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric

        local = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self.num_bytes = num_bytes
        _ALLOCATIONS.add(self)
        self._handle = symmetric.rendezvous(local, group)
        ranks = range(dist.get_world_size(group))
        self.parts = [self._handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in ranks]

    def barrier(self, channel: int = 0) -> None:
        self._handle.barrier(channel=channel)


class _SharedFiles(Memory):
    """Memory of gloo ranks of one machine: files that all of them map."""

    def __init__(
        self, num_bytes: int, _group: dist.ProcessGroup, host_group: dist.ProcessGroup, _device: torch.device
    ) -> None:
        self._group = host_group
        self.parts = [torch.frombuffer(mapped, dtype=torch.uint8) for mapped in _map_files(num_bytes, host_group)]

    def barrier(self, channel: int = 0) -> None:
        with watch.operation("wait for the other ranks of the machine to write their tokens"):
            dist.barrier(self._group)


def allocate_shared(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Memory:
    """`num_bytes` of each rank, uninitialised; every rank of the group, on GPUs of one machine or gloo, must call it."""
    make = _SymmetricMemory if device.type == "cuda" else _SharedFiles
    return make(num_bytes, group, group, device)


class _SharedNumbers:
    """Exchanges one number per rank, 0 <= number < 2**32, through memory that all ranks map, in microseconds.

    A word contains the call number and the value, so that both change atomically. Two words alternate: a rank writes a word
    again only after the call in between, which ends when all ranks have entered it: by then all have read the word.
    """

    _NUMBER_BITS = 32

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = dist.get_rank(group)
        self._words = [numpy.frombuffer(mapped, dtype=numpy.int64) for mapped in _map_files(16, group)]
        self._calls = 0

    def exchange(self, number: int) -> list[int]:
        """The numbers of all ranks in this call, in rank order.

        Raises:
            TimeoutError: a rank did not reach this call.
        """
        self._calls += 1
        turn, deadline = self._calls % 2, time.monotonic() + dist.default_pg_timeout.total_seconds()
        self._words[self._rank][turn] = self._calls << self._NUMBER_BITS | number
        for rank, words in enumerate(self._words):
            while int(words[turn]) >> self._NUMBER_BITS != self._calls:
                time.sleep(0)  # yields the core
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"Rank {rank} of the group did not reach exchange {self._calls} of experts' tokens."
                    )
        return [int(words[turn]) & (1 << self._NUMBER_BITS) - 1 for words in self._words]


def _map_files(num_bytes: int, group: dist.ProcessGroup) -> list[mmap.mmap]:
    """A zero-filled file of each rank, mapped by all ranks; the files are deleted, the maps stay."""
    with tempfile.TemporaryDirectory(prefix="peer_memory_") as folder:
        with (Path(folder) / "bytes").open("wb") as file:
            file.truncate(num_bytes)
        maps = [_map(Path(path) / "bytes", num_bytes) for path in gather_objects(folder, group)]
        dist.barrier(group)  # the files may be deleted once all have mapped them
    return maps


def _map(path: Path, num_bytes: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), num_bytes)
