"""Memory that the ranks of one host read from each other directly: no message, no size on its way, no wait of the host.

    published = buffers.publish([(0, tokens), (offset, index)])    this rank's bytes; returns when all have written theirs
    kernels read published.addresses

On GPUs it is torch's symmetric memory, reached by pointer over NVLink or PCIe; without multicast. On CPUs it is memory that
processes map together, so that the same code runs on gloo ranks.

A rank writes into one of two buffers in turn, and a barrier follows each writing. Who writes a buffer for the second time
has passed the barrier between, and every rank came to that barrier after its last reading of this buffer: so one barrier
per exchange is enough.

    rank 0    write A | barrier | read A | write B | barrier | read B | write A ...
    rank 1    write A | barrier | read A ........ | write B | barrier ...

Sums that are pushed (`turn`) are written into the buffers of other ranks before the barrier. Who pushes into B has waited for
the exchange before, in A: every rank came to that barrier after its last reading of B.

    rank 0    write A | barrier | read A | push into B of all | barrier | read own B | write A ...

A layer has five exchanges in a step (tokens, sums, gradients of sums, gradients of tokens; tokens sent ahead have one of their
own) and three in evaluation. A replayed graph begins on the same buffer each time, so a capture has an even number
(`repeatable`).
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from patchgen.kernels.peers.peer_rows import Published, Tokens
from patchgen.runtime.parallel import watch
from patchgen.runtime.parallel.collectives import gather_objects

ExpertExchange = Literal["auto", "all_to_all", "peer_memory"]
ShardExchange = Literal["auto", "collectives", "peer_memory"]

_MEASURED_RANKS = 4
"""Largest group in which peer memory was measured on GPUs, against all-to-all: "auto" chooses it up to there."""

ALIGNMENT = 256
_GRAIN = 2**20  # sizes are rounded up to it, and to an eighth more than was asked for: longer rows may follow


def for_experts(mesh: DeviceMesh, exchange: ExpertExchange, *, has_capacity: bool) -> PeerBuffers | None:
    """The buffers of this rank's EP group, or None where tokens travel by all-to-all; every rank must call it.

    Args:
        mesh: of experts, its last dimension `ep`.
        exchange: "auto" is peer memory between GPUs that can have it, in groups that were measured.
        has_capacity: what a rank sends is bounded and the rest left out, which is a property of all-to-all.

    Raises:
        ValueError: peer memory asked for where ranks cannot read each other's; the message says why.
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
        reason = _unreachable(mesh)
    if reason is None:
        buffers, reason = _try_buffers(mesh)
    if reason is not None and exchange != "auto":
        raise ValueError(f"expert_exchange='peer_memory' is unavailable: {reason} Use 'all_to_all'.")
    return buffers


def _try_buffers(mesh: DeviceMesh) -> tuple[PeerBuffers | None, str | None]:
    """The buffers, small ones at first, or why some rank could not make them; every rank comes to the same end."""
    groups = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
    own: dist.ProcessGroup | None = None
    for ranks in groups:  # every rank takes part in making every group
        made = dist.new_group(ranks, backend="gloo")
        own = made if isinstance(made, dist.ProcessGroup) and dist.get_rank() in ranks else own
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    error: str | None = None
    if own is None:
        raise ValueError(f"Rank {dist.get_rank()} is on no group of {mesh}.")
    try:
        buffers = PeerBuffers(mesh.get_group("ep"), own, torch.device(device))
        buffers.reserve(1)
    except (RuntimeError, OSError) as refused:  # what drivers and containers allow shows when it is tried
        buffers, error = None, f"rank {dist.get_rank()} could not share memory ({refused})."
    reason = next((one for one in gather_objects(error) if one is not None), None)
    if reason is not None:
        warnings.warn(f"Experts' tokens travel by all-to-all: {reason}", stacklevel=2)
        return None, reason
    return buffers, None


def is_unavailable(mesh: DeviceMesh, exchange: ShardExchange) -> bool:
    """Whether ranks leave their shards to collectives; every rank of all groups must call it, and gets the same answer.

    Args:
        mesh: of one dimension, over whose ranks shards are divided.
        exchange: "auto" is peer memory between GPUs that can have it, in groups that were measured.

    Raises:
        ValueError: peer memory asked for where ranks cannot read each other's; the message says why.
    """
    if exchange == "auto" and (mesh.device_type != "cuda" or mesh.size() > _MEASURED_RANKS):
        return True
    hosts = gather_objects(socket.gethostname())
    ranks = mesh.mesh.flatten().tolist()
    own = sorted({hosts[rank] for rank in ranks})
    error = _reachable(mesh) if len(own) == 1 else f"ranks {ranks} share shards and run on hosts {', '.join(own)}."
    errors = gather_objects(error)
    if not any(errors):
        device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
        try:
            share(_GRAIN, mesh.get_group(), torch.device(device))
        except (RuntimeError, OSError) as refused:
            error = f"rank {dist.get_rank()} could not share memory ({refused})."
        errors = gather_objects(error)
    reason = next((one for one in errors if one is not None), None)
    if reason is not None and exchange != "auto":
        raise ValueError(f"shard_exchange='peer_memory' is unavailable: {reason} Use 'collectives'.")
    if reason is not None:
        warnings.warn(f"Shards are gathered by collectives: {reason}", stacklevel=2)
    return reason is not None


def _unreachable(mesh: DeviceMesh) -> str | None:
    """Why the ranks of some group along `ep` cannot read each other's memory; the same answer on every rank."""
    found = gather_objects((socket.gethostname(), _reachable(mesh)))
    for ranks in mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist():
        hosts = sorted({found[rank][0] for rank in ranks})
        if len(hosts) > 1:
            return f"ranks {ranks} exchange tokens and run on several hosts ({', '.join(hosts)})."
    return next((reason for _, reason in found if reason is not None), None)


def _reachable(mesh: DeviceMesh) -> str | None:
    """Why this rank's device cannot read the others of this host; None if it can."""
    if mesh.device_type != "cuda":
        return None
    own = torch.cuda.current_device()
    for other in range(torch.cuda.device_count()):
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} has no access to the memory of GPU {other}."
    return None


def aligned(num_bytes: int) -> int:
    """The first multiple of `ALIGNMENT` that is not smaller."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PeerBuffers:
    """Two buffers of each rank of a group, written in turn; every rank makes the same calls in the same order.

    Args:
        group: the ranks that read from each other, all of one host.
        host_group: the same ranks in a gloo group, for what they tell each other on the host.
        device: where the buffers are.

    Attributes:
        num_bytes: of one buffer; 0 before the first exchange.
    """

    def __init__(self, group: dist.ProcessGroup, host_group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.host_group, self.device = group, host_group, device
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.num_bytes = 0
        self._memory: _SymmetricMemory | _SharedFiles | None = None
        self._turns: list[Published] = []
        self._num_turns, self._is_open = 0, False  # open: from a turn to its barrier
        # Before what computes beside: others wait for it.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._starts = functools.lru_cache(maxsize=1024)(self._count)
        self._numbers = _SharedNumbers(host_group)

    def agree(self, count: int) -> Tokens:
        """How many tokens each rank has. The hosts tell each other; no device is waited for."""
        with watch.operation("tell the other ranks of the host how many tokens there are"):
            return self._starts(*self._numbers.exchange(count))

    def all_say(self, yes: bool) -> bool:
        """Whether every rank says so. The hosts tell each other; no device is waited for."""
        with watch.operation("agree with the other ranks of the host on how tokens travel"):
            return all(self._numbers.exchange(int(yes)))

    def _count(self, *counts: int) -> Tokens:
        starts = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
        if self.device.type == "cuda":  # from pinned memory: a copy from other memory would wait for the device
            starts = starts.pin_memory().to(self.device, non_blocking=True)
        return Tokens(counts, starts)

    def reserve(self, num_bytes: int) -> None:
        """Makes each buffer at least so large; the same number on every rank. Waits for the device if they grow."""
        if num_bytes <= self.num_bytes:
            return
        size = -(-(num_bytes + num_bytes // 8) // _GRAIN) * _GRAIN
        with watch.operation("enlarge the buffers that the ranks of the host read from each other"):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # nothing reads the old buffers any more
            dist.barrier(self.host_group)
            self._turns, self._memory = [], None
            make = _SymmetricMemory if self.device.type == "cuda" else _SharedFiles
            self._memory = make(2 * size, self.group, self.host_group, self.device)
            self._turns = [self._memory.published(turn * size, size) for turn in range(2)]
        self.num_bytes = size

    def turn(self) -> Published:
        """The ranks' next buffers. Who has waited for the last exchange may write into any of them; `publish` ends that.

        Raises:
            RuntimeError: nothing ended the turn before.
        """
        if self._is_open:
            raise RuntimeError(
                f"Rank {self.rank} of the host expected that exchange {self._num_turns} of experts' tokens had ended, and an "
                "error left it between two ranks' buffers: what they hold, and which is next, is unknown. To fix: mend that "
                "earlier error, and make a new ParallelState on all ranks, or start them again."
            )
        self._num_turns, self._is_open = self._num_turns + 1, True
        self._turns.reverse()
        return self._turns[0]

    def publish(self, parts: Sequence[tuple[int, Tensor]], turned: Published | None = None) -> Published:
        """Writes tensors at byte offsets of this rank's next buffer; returns all ranks' when they are written.

        On a GPU in the order of the current stream.

        Args:
            turned: those of `turn`, if that was called for this exchange.
        """
        if self._memory is None:
            raise RuntimeError("Nothing is published before memory is reserved for it: call `reserve` first.")
        published = self.turn() if turned is None else turned
        for offset, tensor in parts:
            published.read(self.rank, offset, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        self._memory.barrier()
        self._is_open = False
        return published

    @contextlib.contextmanager
    def repeatable(self) -> Iterator[None]:
        """What the block launches may be launched again: it ends on the buffer that it did not begin with."""
        before = self._num_turns
        yield
        if (self._num_turns - before) % 2:
            with self.beside():
                self.publish([])
            self.wait()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Runs the block on a stream of its own, after what was launched before; `wait` ends that. On CPUs at once."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """What is launched from now on comes after the blocks of `beside`. The host goes on."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)


_live: weakref.WeakSet[_SymmetricMemory] = weakref.WeakSet()


def num_bytes_shared() -> int:
    """Bytes of this rank's GPU that other ranks read: torch's own counts leave them out."""
    return sum(memory.num_bytes for memory in _live)


class _SymmetricMemory:
    """torch's symmetric memory on GPUs of one host."""

    def __init__(
        self, num_bytes: int, group: dist.ProcessGroup, _host_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self.num_bytes = num_bytes
        _live.add(self)
        self._handle = symmetric.rendezvous(own, group)
        ranks = range(dist.get_world_size(group))
        self.parts = [self._handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in ranks]

    def published(self, offset: int, size: int) -> Published:
        parts = tuple(part[offset : offset + size] for part in self.parts)
        return Published(parts, torch.tensor([part.data_ptr() for part in parts], device=parts[0].device))

    def barrier(self, channel: int = 0) -> None:
        """In the order of the current stream. Those of different channels may run beside each other."""
        self._handle.barrier(channel=channel)


class _SharedFiles:
    """Files that all ranks map: gloo ranks of one host."""

    def __init__(
        self, num_bytes: int, _group: dist.ProcessGroup, host_group: dist.ProcessGroup, _device: torch.device
    ) -> None:
        self._group = host_group
        self.parts = [torch.frombuffer(mapped, dtype=torch.uint8) for mapped in _map_files(num_bytes, host_group)]

    def published(self, offset: int, size: int) -> Published:
        parts = tuple(part[offset : offset + size] for part in self.parts)
        return Published(parts, torch.tensor([part.data_ptr() for part in parts]))

    def barrier(self, channel: int = 0) -> None:
        """At once, whatever the channel."""
        with watch.operation("wait for the other ranks of the host to write their tokens"):
            dist.barrier(self._group)


Memory = _SymmetricMemory | _SharedFiles
"""Bytes of each rank of a group, `parts`, that all of them read and write; `barrier(channel)`."""


def share(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Memory:
    """So many bytes of each rank, uninitialised; every rank of the group must call it.

    Args:
        group: of GPUs of one host, or of gloo ranks.
    """
    make = _SymmetricMemory if device.type == "cuda" else _SharedFiles
    return make(num_bytes, group, group, device)


class _SharedNumbers:
    """One number of each rank, told to the others through memory that they all map: once per layer, in microseconds.

    A word holds the number of the call and what is told in it, so that both change at once. There are two, used in turn: who
    comes to the call after the next has read the words of all ranks in between, and they had read its.
    """

    _COUNT_BITS = 32

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._own = dist.get_rank(group)
        self._words = [numpy.frombuffer(mapped, dtype=numpy.int64) for mapped in _map_files(16, group)]
        self._calls = 0

    def exchange(self, number: int) -> list[int]:
        """The numbers of all ranks in this call, in the order of ranks.

        Raises:
            TimeoutError: a rank did not come.
        """
        self._calls += 1
        turn, deadline = self._calls % 2, time.monotonic() + dist.default_pg_timeout.total_seconds()
        self._words[self._own][turn] = self._calls << self._COUNT_BITS | number
        for rank, words in enumerate(self._words):
            while int(words[turn]) >> self._COUNT_BITS != self._calls:
                time.sleep(0)  # lets another thread or process have this core
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"Rank {rank} of the host did not reach exchange {self._calls} of experts' tokens."
                    )
        return [int(words[turn]) & (1 << self._COUNT_BITS) - 1 for words in self._words]


def _map_files(num_bytes: int, group: dist.ProcessGroup) -> list[mmap.mmap]:
    """A file of zeros of each rank, mapped by all ranks; gone when they end."""
    with tempfile.TemporaryDirectory(prefix="peer_memory_") as folder:
        with (Path(folder) / "bytes").open("wb") as file:
            file.truncate(num_bytes)
        maps = [_map(Path(one) / "bytes", num_bytes) for one in gather_objects(folder, group)]
        dist.barrier(group)  # the files may go when all have mapped them
    return maps


def _map(path: Path, num_bytes: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), num_bytes)
