"""Shards that the ranks of one host read from each other's memory: FSDP2 without its copies and without collectives.

Every rank keeps its shards, in the dtype of computing, where the others can read them. Bytes that a rank's memory moves per
parameter of a unit in a step, fp32 parameters computed with in bf16, two ranks:

    FSDP2        cast before the forward and again before the backward 6, copied out of the all-gather twice 8,
                 copied for the exchange of gradients 4, their sum 4
    here         arrives in its place twice 4 (the optimizer writes the copy in passing 1), sum of gradients 4

What arrives is moved by the copy engines, not by the processors that compute, and so are gradients on their way:

    gather       each rank reads the shards of the others into the parameter, each part into its place
    reduce       each rank writes the parts of its gradients that others sum into their memory; a barrier; each adds up what
                 it received and its own, in fp32, in the order of the ranks (`kernels/peers/peer_sums.py`)

Barriers run on the device, the host waits for none: one before the first gather after copies were written, one before they
are written again, one per reduction. What is received alternates between two places, for the reason in `peer_memory.py`. The
numbers are those of FSDP2 with `exchange_reduce.py`, to the bit. As in `undivided.py`, a copy that the optimizer wrote is used
in training until the parameter is changed otherwise; in evaluation every forward casts.

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

from patchgen.kernels.peers.peer_sums import sum_parts
from patchgen.runtime.parallel import peer_memory, undivided
from patchgen.runtime.parallel.peer_memory import aligned

if TYPE_CHECKING:
    from patchgen.runtime.parallel.peer_units import PeerGroup

_READ, _WRITE, _REDUCE = range(3)  # barriers of one memory that may run beside each other
NOTHING = 0
"""The word of a rank that has no gradient to send; each sum has a word of its own (`PeerGroup.word_of`)."""
PIECE = 2**27
"""Bytes of a large gradient that are sent at once: what is received needs room for a piece, not for the largest parameter."""
_UNDER_WAY = 2
"""Reductions whose gradients are kept for them: with one, a layer's second product would wait for the sum of its first."""


@dataclass
class Slot:
    """Where one parameter's shard lies in the region of its unit, which is laid out alike on every rank.

    Attributes:
        param: FSDP2's.
        start: of the shard in the region, in elements.
        rows: of a shard, padded; the last shards may have fewer.
        row: elements of a row.
        is_small: whether it is copied together with others.
    """

    param: FSDPParam
    start: int
    rows: int
    row: int
    is_small: bool

    @property
    def numel(self) -> int:
        return self.rows * self.row

    def numel_of(self, rank: int) -> int:
        """Elements of a rank's shard."""
        whole = self.param._orig_size[0]
        return max(0, min(whole - rank * self.rows, self.rows)) * self.row


class PeerCopy(undivided.ComputeCopy):
    """A shard in the dtype of computing, which other ranks read."""

    def __init__(self, tensor: Tensor, shards: PeerShards) -> None:
        super().__init__(tensor)
        self._shards = shards

    def before_writing(self) -> None:
        self._shards.begin_writing()


class PeerShards:
    """What the ranks of one group read from each other: the copies of their shards, and gradients that were sent.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, groups: Sequence[PeerGroup]) -> None:
        self.group, self.device = group, device
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._groups = groups
        self._memory: peer_memory.Memory | None = None
        self.is_written = False  # since the last barrier before a gather
        self._turn = 0
        self._reductions_under_way: deque[tuple[torch.Event | None, list[Tensor]]] = deque()
        on_gpu = device.type == "cuda"
        self._gathers = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._reductions = torch.cuda.Stream(device, priority=-1) if on_gpu else None

    # ------------------------------------------------------------------------------------------------- memory

    def lay_out(self) -> None:
        """Makes the memory, once, when it is known which units keep copies."""
        if self._memory is not None:
            return
        groups = [group for group in self._groups if group.keeps_copies]
        starts, size, most, small = {}, 0, 0, 0
        for group in groups:
            starts[id(group)] = size
            region = aligned(group.region * group.itemsize)
            size += region
            small = max(small, aligned(group.small_region * group.itemsize))
            most = max(most, small, *(aligned(min(PIECE, slot.numel * group.itemsize)) for slot in group.slots))
        # Of each turn: what the others sent, their words, and this rank's own small parts.
        others = self.num_ranks - 1
        words = aligned(others * torch.int64.itemsize)
        turn = others * most + words + small
        self._memory = peer_memory.share(size + 2 * turn, self.group, self.device)
        self._turns = [(start, start + others * most, start + others * most + words) for start in (size, size + turn)]
        self._most = most
        for group in groups:
            group.bind(
                [self._view(rank, starts[id(group)], group.region, group.dtype) for rank in range(self.num_ranks)]
            )

    @property
    def memory(self) -> peer_memory.Memory:
        """What all ranks of the group see, once it is laid out."""
        if self._memory is None:
            raise RuntimeError("The shards of other ranks are read once their places are known: call `lay_out` first.")
        return self._memory

    def _view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self.memory.parts[rank][offset : offset + numel * dtype.itemsize].view(dtype)

    # ------------------------------------------------------------------------------------------------ streams

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Runs the block on a stream, after what was launched before. On CPUs at once."""
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
        """What is launched from now on comes after the event. The host goes on."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    # ------------------------------------------------------------------------------------------------- copies

    def begin_writing(self) -> None:
        """Before copies are written: all ranks have read them."""
        if self.is_written:
            return
        if self._gathers is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._gathers)
        self.memory.barrier(_WRITE)
        self.is_written = True

    def have_been_read(self) -> None:
        """Says that gathers have run since copies were written: those of a replayed graph, of which the host knows nothing."""
        self.is_written = False

    def gather(self, group: PeerGroup) -> torch.Event | None:
        """Reads the shards of all ranks into the parameters of a unit."""
        targets = [slot.param.all_gather_outputs[0] for slot in group.slots]
        kept = torch.autograd._unsafe_preserve_version_counter  # pyright: ignore[reportPrivateImportUsage]
        with self._on(self._gathers), kept(tuple(targets)):
            if self.is_written:
                self.memory.barrier(_READ)
                self.is_written = False
            for target, source in group.large_copies:
                target.copy_(source)
            if group.small_copies[0]:
                torch._foreach_copy_(*group.small_copies)  # pyright: ignore[reportPrivateImportUsage]
        return self._event(self._gathers)

    # ---------------------------------------------------------------------------------------------- gradients

    def reduce(self, group: PeerGroup, gradients: list[tuple[Slot, Tensor]]) -> torch.Event | None:
        """Sums gradients `[D, ...]` over the ranks: each parameter gets this rank's part of the sum.

        Args:
            gradients: of one large parameter, or of small ones. One after the other, so that a layer's experts leave while it
                still computes, and what the others send needs room for the largest only.
        """
        # Small ones end a unit's backward: what its large ones hold is free before the next computes gradients.
        most = 0 if gradients[0][0].is_small else _UNDER_WAY - 1
        while len(self._reductions_under_way) > most:
            self.wait(self._reductions_under_way.popleft()[0])  # its memory may be freed then
        flat = [(slot, gradient.contiguous().view(-1)) for slot, gradient in gradients]
        slots = [slot for slot, _ in flat]
        word = group.word_of(slots)
        first, gradient = flat[0]
        start, numel = (0, group.small_region) if first.is_small else (first.start, first.numel)
        summed = torch.empty(numel, dtype=group.stored_dtype, device=self.device)
        with self._on(self._reductions):
            for begin, end in _pieces(group, slots):
                self._meet(group, flat, word, begin, end)
                if first.is_small:
                    own = self._view(self.rank, self._turns[self._turn][2], end - begin, group.dtype)
                else:
                    shard = gradient[self.rank * numel :][: first.numel_of(self.rank)]
                    own = shard[begin - start : end - start]
                self._sum(group, own, word, summed[begin - start : end - start])
            for slot in slots:
                _take(slot, summed[slot.start - start : slot.start - start + slot.numel])
        event = self._event(self._reductions)
        # Until it was waited for: memory that this stream frees may be given out again while the other one still writes it.
        # The sum, too: where it is added to a gradient that is there, nothing else keeps it.
        self._reductions_under_way.append((event, [summed, *(gradient for _, gradient in flat)]))
        return event

    def reduce_nothing(self, group: PeerGroup, slots: list[Slot]) -> None:
        """Takes part in a reduction for which this rank has no gradient: ranks that have one get NaN, and none waits."""
        with self._on(self._reductions):
            for _ in _pieces(group, slots):
                self._meet(group, [], NOTHING, 0, 0)
        self._reductions_under_way.append((self._event(self._reductions), []))

    def _meet(self, group: PeerGroup, flat: list[tuple[Slot, Tensor]], word: int, begin: int, end: int) -> None:
        """Sends gradients and what they are of, and waits for the others'; small ones of this rank are put together.

        Args:
            begin: of what is sent, in elements of the unit's region; `end` likewise.
        """
        self._turn = 1 - self._turn
        received, words, own_small = self._turns[self._turn]
        small_targets, small_sources = [], []
        for rank in range(self.num_ranks):
            if rank == self.rank:
                region = self._view(rank, own_small, group.small_region, group.dtype)
            else:
                place = (self.rank - rank - 1) % self.num_ranks
                region = self._view(rank, received + place * self._most, end - begin, group.dtype)
                there = words + place * torch.int64.itemsize
                self._view(rank, there, 1, torch.int64).copy_(group.word_tensor(word))
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

    def _sum(self, group: PeerGroup, own: Tensor, word: int, out: Tensor) -> None:
        received, words, _ = self._turns[self._turn]
        others, length = self.num_ranks - 1, len(own)
        parts = self._view(self.rank, received, others * self._most // group.itemsize, group.dtype).view(others, -1)
        their_words = self._view(self.rank, words, others, torch.int64)
        sum_parts(own, parts[:, :length], their_words, out[:length], rank=self.rank, word=word)

    def finish(self) -> None:
        """What is launched from now on comes after the reductions."""
        while self._reductions_under_way:
            self.wait(self._reductions_under_way.popleft()[0])


def _pieces(group: PeerGroup, slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """What is sent at once, as elements of the unit's region: small gradients together, a large one in pieces."""
    first = slots[0]
    if first.is_small:
        return [(0, group.small_region)]
    end, piece = first.start + first.numel, PIECE // group.itemsize
    return [(begin, min(begin + piece, end)) for begin in range(first.start, end, piece)]


def _take(slot: Slot, out: Tensor) -> None:
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
