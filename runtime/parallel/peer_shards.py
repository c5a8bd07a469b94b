"""Shards that the ranks of one machine read from each other's memory: FSDP2 without its copies and collectives.

Every rank keeps its shards, in the compute dtype, in memory that the others can read. Memory traffic of a rank in bytes per
parameter and step, for fp32 parameters, bf16 compute and two ranks:

    FSDP2        cast before the forward and again before the backward 6, copied out of the all-gather twice 8,
                 copied for the exchange of gradients 4, their sum 4
    here         received in place twice 4 (the optimizer writes the copy in its step 1), sum of gradients 4

Shards and gradients are moved by the copy engines, not by the multiprocessors:

    gather       each rank reads the shards of the others into the parameter
    reduce       each rank writes the parts of its gradients that others sum into their memory; a barrier; each sums what
                 it received and its own, in fp32 and in rank order (`kernels/peers/peer_sums.py`)

Barriers run on the device; the host does not wait: one before the first gather after copies were written, one before they
are written again, one per reduction. Receive buffers alternate, for the reason in `peer_memory.py`. Results are bit-identical
to FSDP2 with `exchange_reduce.py`. As in `undivided.py`, a copy that the optimizer wrote is used in training until the
parameter is changed otherwise; in evaluation every forward casts.

`peer_units.py` has the units of a model that use this.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from patchgen.runtime.parallel import peer_memory, undivided
from patchgen.runtime.parallel.peer_memory import aligned

if TYPE_CHECKING:
    from patchgen.runtime.parallel.peer_units import PeerGroup

_READ, _WRITE, _REDUCE = range(3)  # barrier channels of one memory: barriers that may overlap
NO_GRADIENT = 0
"""The tag of a rank without a gradient to send; each sum has its own tag (`PeerGroup.tag_of`)."""
MAX_PIECE_BYTES = 2**27
"""Bytes of a large gradient that are sent at once, so that receive buffers have room for a piece, not for the largest parameter."""
_MAX_PENDING_REDUCTIONS = 2
"""Reductions in flight whose gradients are kept alive: with one, a layer's second product would wait for the first sum."""


@dataclass
class ShardSlot:
    """The place of one parameter's shard in the region of its unit, which has the same layout on every rank.

    Attributes:
        param: FSDP2's parameter.
        start: offset of the shard in the region, in elements.
        rows: of a shard, padded; the last shards may have fewer.
        row_numel: elements of a row.
        is_small: whether it is copied together with others.
    """

    param: FSDPParam
    start: int
    rows: int
    row_numel: int
    is_small: bool

    @property
    def numel(self) -> int:
        return self.rows * self.row_numel

    def numel_of(self, rank: int) -> int:
        """Elements of a rank's shard."""
        total_rows = self.param._orig_size[0]
        return max(0, min(total_rows - rank * self.rows, self.rows)) * self.row_numel


class PeerCopy(undivided.ComputeCopy):
    """A shard in the compute dtype, which other ranks read."""

    def __init__(self, tensor: Tensor, shards: PeerShards) -> None:
        super().__init__(tensor)
        self._shards = shards

    def before_writing(self) -> None:
        self._shards.begin_writing()


class PeerShards:
    """The memory that the ranks of one group read from each other: copies of their shards, and received gradients.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, groups: Sequence[PeerGroup]) -> None:
        self.group, self.device = group, device
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._groups = groups
        self._memory: peer_memory.Memory | None = None
        self.is_written = False  # since the last barrier before a gather
        self._turn = 0
        self._pending_reductions: deque[tuple[torch.Event | None, list[Tensor]]] = deque()
        on_gpu = device.type == "cuda"
        self._gathers = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._reductions = torch.cuda.Stream(device, priority=-1) if on_gpu else None

    # ------------------------------------------------------------------------------------------------- memory

    def allocate(self) -> None:
        """Allocates the memory, once, when it is known which units keep copies."""
        if self._memory is not None:
            return
        groups = [group for group in self._groups if group.keeps_copies]
        starts, size, largest, small = {}, 0, 0, 0
        for group in groups:
            starts[id(group)] = size
            region = aligned(group.region * group.itemsize)
            size += region
            small = max(small, aligned(group.small_region * group.itemsize))
            largest = max(
                largest, small, *(aligned(min(MAX_PIECE_BYTES, slot.numel * group.itemsize)) for slot in group.slots)
            )
        # Two receive buffers, each for the parts that others sent, their tags, and this rank's own small parts.
        num_others = self.num_ranks - 1
        tags = aligned(num_others * torch.int64.itemsize)
        turn = num_others * largest + tags + small
        self._memory = peer_memory.allocate_shared(size + 2 * turn, self.group, self.device)
        self._turns = [
            (start, start + num_others * largest, start + num_others * largest + tags) for start in (size, size + turn)
        ]
        self._largest_part = largest
        for group in groups:
            group.create_copies(
                [self._view(rank, starts[id(group)], group.region, group.dtype) for rank in range(self.num_ranks)]
            )

    @property
    def memory(self) -> peer_memory.Memory:
        """The shared memory; raises before `allocate`."""
        if self._memory is None:
            raise RuntimeError("The shards of other ranks are not allocated yet. To fix: call `allocate` first.")
        return self._memory

    def _view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self.memory.parts[rank][offset : offset + numel * dtype.itemsize].view(dtype)

    # ------------------------------------------------------------------------------------------------ streams

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Runs the block on a stream, after earlier launches; on CPUs synchronously."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    @staticmethod
    def _event(stream: torch.cuda.Stream | None) -> torch.Event | None:
        return None if stream is None else stream.record_event()

    def wait(self, event: torch.Event | None) -> None:
        """Makes later launches wait for the event; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    # ------------------------------------------------------------------------------------------------- copies

    def begin_writing(self) -> None:
        """Waits, before copies are written, until all ranks have read them."""
        if self.is_written:
            return
        if self._gathers is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._gathers)
        self.memory.barrier(_WRITE)
        self.is_written = True

    def mark_read(self) -> None:
        """Records that copies were gathered since they were written, by a replayed graph, which the host does not see."""
        self.is_written = False

    def gather(self, group: PeerGroup) -> torch.Event | None:
        """Reads the shards of all ranks into the parameters of a unit."""
        targets = [slot.param.all_gather_outputs[0] for slot in group.slots]
        versions_preserved = torch.autograd._unsafe_preserve_version_counter  # pyright: ignore[reportPrivateImportUsage]
        with self._on(self._gathers), versions_preserved(tuple(targets)):
            if self.is_written:
                self.memory.barrier(_READ)
                self.is_written = False
            for target, source in group.large_copies:
                target.copy_(source)
            if group.small_copies[0]:
                torch._foreach_copy_(*group.small_copies)  # pyright: ignore[reportPrivateImportUsage]
        return self._event(self._gathers)

    # ---------------------------------------------------------------------------------------------- gradients

    def reduce(self, group: PeerGroup, gradients: list[tuple[ShardSlot, Tensor]]) -> torch.Event | None:
        """Sums full gradients over the ranks: each parameter gets this rank's part of the sum.

        Args:
            gradients: of one large parameter, sent in pieces, or of all small ones of a unit. Separate calls let a layer's experts
                be reduced while the layer still computes. How many pieces depends on the parameter only: the same on every rank.
        """
        # Small ones end a unit's backward: the memory of its large ones is free before the next unit computes gradients.
        max_pending = 0 if gradients[0][0].is_small else _MAX_PENDING_REDUCTIONS - 1
        while len(self._pending_reductions) > max_pending:
            self.wait(self._pending_reductions.popleft()[0])  # then its memory may be freed
        flat = [(slot, gradient.contiguous().view(-1)) for slot, gradient in gradients]
        slots = [slot for slot, _ in flat]
        tag = group.tag_of(slots)
        first, gradient = flat[0]
        start, numel = (0, group.small_region) if first.is_small else (first.start, first.numel)
        summed = torch.empty(numel, dtype=group.stored_dtype, device=self.device)
        with self._on(self._reductions):
            for begin, end in _pieces(group, slots):
                self._send_parts(group, flat, tag, begin, end)
                if first.is_small:
                    own_part = self._view(self.rank, self._turns[self._turn][2], end - begin, group.dtype)
                else:
                    shard = gradient[self.rank * numel :][: first.numel_of(self.rank)]
                    own_part = shard[begin - start : end - start]
                self._sum_parts(group, own_part, tag, summed[begin - start : end - start])
            for slot in slots:
                _accumulate(slot, summed[slot.start - start : slot.start - start + slot.numel])
        event = self._event(self._reductions)
        # Kept until waited for, so that the allocator does not reuse the memory while the other stream still writes it. The
        # sum as well: if it is added to an existing gradient, nothing else keeps it alive.
        self._pending_reductions.append((event, [summed, *(gradient for _, gradient in flat)]))
        return event

    def reduce_without_gradient(self, group: PeerGroup, slots: list[ShardSlot]) -> None:
        """Takes part in a reduction without a gradient of this rank: ranks that have one get NaN, and none hangs."""
        with self._on(self._reductions):
            for _ in _pieces(group, slots):
                self._send_parts(group, [], NO_GRADIENT, 0, 0)
        self._pending_reductions.append((self._event(self._reductions), []))

    def _send_parts(
        self, group: PeerGroup, flat: list[tuple[ShardSlot, Tensor]], tag: int, begin: int, end: int
    ) -> None:
        """Sends gradients with their tag, packing small ones, and waits for those of the others.

        Args:
            begin, end: the range that is sent, in elements of the unit's region.
        """
        self._turn = 1 - self._turn
        received_start, tags, own_small = self._turns[self._turn]
        small_targets, small_sources = [], []
        for rank in range(self.num_ranks):
            if rank == self.rank:
                region = self._view(rank, own_small, group.small_region, group.dtype)
            else:
                place = (self.rank - rank - 1) % self.num_ranks
                region = self._view(rank, received_start + place * self._largest_part, end - begin, group.dtype)
                tag_offset = tags + place * torch.int64.itemsize
                self._view(rank, tag_offset, 1, torch.int64).copy_(group.tag_tensor(tag))
            for slot, gradient in flat:
                first, last = max(begin, slot.start), min(end, slot.start + slot.numel_of(rank))
                if first < last and (slot.is_small or rank != self.rank):
                    target = region[first - begin : last - begin]
                    source = gradient[rank * slot.numel :][first - slot.start : last - slot.start]
                    if slot.is_small:
                        small_targets.append(target)
                        small_sources.append(source)
                    else:
                        target.copy_(source)
        if small_targets:
            torch._foreach_copy_(small_targets, small_sources)  # pyright: ignore[reportPrivateImportUsage]
        self.memory.barrier(_REDUCE)

    def _sum_parts(self, group: PeerGroup, own: Tensor, tag: int, out: Tensor) -> None:
        from patchgen.kernels.peers.peer_sums import sum_parts  # loads Triton

        received_start, tags, _ = self._turns[self._turn]
        num_others, length = self.num_ranks - 1, len(own)
        parts = self._view(
            self.rank, received_start, num_others * self._largest_part // group.itemsize, group.dtype
        ).view(num_others, -1)
        their_tags = self._view(self.rank, tags, num_others, torch.int64)
        sum_parts(own, parts[:, :length], their_tags, out[:length], rank=self.rank, tag=tag)

    def finish(self) -> None:
        """Makes later launches wait for all reductions."""
        while self._pending_reductions:
            self.wait(self._pending_reductions.popleft()[0])


def _pieces(group: PeerGroup, slots: Sequence[ShardSlot]) -> list[tuple[int, int]]:
    """The ranges sent at once, in elements of the unit's region: small gradients together, a large one in pieces."""
    first = slots[0]
    if first.is_small:
        return [(0, group.small_region)]
    end, piece = first.start + first.numel, MAX_PIECE_BYTES // group.itemsize
    return [(begin, min(begin + piece, end)) for begin in range(first.start, end, piece)]


def _accumulate(slot: ShardSlot, out: Tensor) -> None:
    """This rank's part of a sum, flat, becomes the gradient of its parameter, or is added to the one that is there."""
    param = slot.param
    new = torch.as_strided(out, param.sharded_size, param.contiguous_sharded_stride)
    target = param.sharded_param
    if target.grad is None:
        target.grad = param.to_sharded_dtensor(new)
    else:
        undivided.local(target.grad).add_(new)
    for hook in (getattr(target, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(target)
