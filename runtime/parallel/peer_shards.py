"""Shards that the ranks of one host read from each other's memory: FSDP2 without its copies and without collectives.

Every rank keeps its shards, in the dtype of computing, where the others can read them. Bytes that a rank's memory moves per
parameter of a unit in a step, fp32 parameters computed with in bf16, two ranks:

    FSDP2        cast before the forward and again before the backward 6, copied out of the all-gather twice 8,
                 copied for the exchange of gradients 4, their sum 4
    here         arrives in its place twice 4 (the optimizer writes the copy in passing 1), sum of gradients 4

What arrives is moved by the copy engines, not by the processors that compute, and so are gradients on their way:

    gather       each rank reads the shards of the others into the parameter, each part into its place
    reduce       each rank writes the parts of its gradients that others sum into their memory; a barrier; each adds up what
                 it received and its own, in fp32, in the order of the ranks (`kernels/peer_sums.py`)

Barriers run on the device, the host waits for none: one before the first gather after copies were written, one before they
are written again, one per reduction. What is received alternates between two places, for the reason in `peer_memory.py`. The
numbers are those of FSDP2 with `exchange_reduce.py`, to the bit. As in `undivided.py`, a copy that the optimizer wrote is used
in training until the parameter is changed otherwise; in evaluation every forward casts.

A unit is left to FSDP2 where it is not stored in a wider dtype than it computes in, is not all trained, is replicated too, or
lies in host memory; and in a backward that ends gradients accumulated without reduction.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from patchgen.kernels.peer_sums import sum_parts
from patchgen.runtime.parallel import peer_memory, undivided
from patchgen.runtime.parallel.peer_memory import aligned

ATTRIBUTE = "_patchgen_units_in_peer_memory"  # of a sharded model: how many
SMALL = 2**25
"""Bytes of a shard. Smaller ones are copied together in one kernel: what a host spends on a copy engine's order, some ten
microseconds, is longer than their way; and they are summed as one."""
_READ, _WRITE, _REDUCE = range(3)  # barriers of one memory that may run beside each other


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
        self._reduction: tuple[torch.cuda.Event | None, list[Tensor]] | None = None
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
            size, most = size + region, max(most, region)
            small = max(small, aligned(group.small_region * group.itemsize))
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

    def _view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self._memory.parts[rank][offset : offset + numel * dtype.itemsize].view(dtype)

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
    def _event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        return None if stream is None else stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
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
        self._memory.barrier(_WRITE)
        self.is_written = True

    def have_been_read(self) -> None:
        """Says that gathers have run since copies were written: those of a replayed graph, of which the host knows nothing."""
        self.is_written = False

    def gather(self, group: PeerGroup) -> torch.cuda.Event | None:
        """Reads the shards of all ranks into the parameters of a unit."""
        targets = [slot.param.all_gather_outputs[0] for slot in group.slots]
        with self._on(self._gathers), torch.autograd._unsafe_preserve_version_counter(tuple(targets)):
            if self.is_written:
                self._memory.barrier(_READ)
                self.is_written = False
            for target, source in group.large_copies:
                target.copy_(source)
            if group.small_copies[0]:
                torch._foreach_copy_(*group.small_copies)
        return self._event(self._gathers)

    # ---------------------------------------------------------------------------------------------- gradients

    def reduce(self, group: PeerGroup, gradients: list[tuple[Slot, Tensor]]) -> torch.cuda.Event | None:
        """Sums gradients `[D, ...]` over the ranks: each parameter gets this rank's part of the sum."""
        if self._reduction is not None:
            self.wait(self._reduction[0])  # its memory may be freed then
        flat = [(slot, gradient.contiguous().view(-1)) for slot, gradient in gradients]
        word = sum(1 << group.slots.index(slot) for slot, _ in flat) % (2**61 - 1)
        options = {"dtype": group.stored_dtype, "device": self.device}
        num_small = group.small_region if any(slot.is_small for slot, _ in flat) else 0
        small = torch.empty(num_small, **options)  # summed as one; of each other one apart, which may be sent apart
        sums = [
            small[slot.start : slot.start + slot.numel] if slot.is_small else torch.empty(slot.numel, **options)
            for slot, _ in flat
        ]
        self._turn = 1 - self._turn
        received, words, own_small = self._turns[self._turn]
        with self._on(self._reductions):
            self._send(group, flat, word, received, words, own_small)
            self._memory.barrier(_REDUCE)
            self._sum(group, flat, word, (received, words, own_small), small, sums)
            for (slot, _), one in zip(flat, sums, strict=True):
                _take(slot, one)
        event = self._event(self._reductions)
        # Until it was waited for: memory that this stream frees may be given out again while the other one still writes it.
        # The sum, too: where it is added to a gradient that is there, nothing else keeps it.
        self._reduction = event, [*sums, *(gradient for _, gradient in flat)]
        return event

    def _send(
        self, group: PeerGroup, flat: list[tuple[Slot, Tensor]], word: int, received: int, words: int, own_small: int
    ) -> None:
        small_targets, small_sources = [], []
        for rank in range(self.num_ranks):
            if rank == self.rank:
                region = self._view(rank, own_small, group.small_region, group.dtype)
            else:
                place = (self.rank - rank - 1) % self.num_ranks
                region = self._view(rank, received + place * self._most, group.region, group.dtype)
                there = words + place * torch.int64.itemsize
                self._view(rank, there, 1, torch.int64).copy_(group.word_tensor(word))
            for slot, gradient in flat:
                numel = slot.numel_of(rank)
                if numel and (slot.is_small or rank != self.rank):
                    target = region[slot.start : slot.start + numel]
                    source = gradient[rank * slot.numel : rank * slot.numel + numel]
                    if slot.is_small:
                        small_targets.append(target)
                        small_sources.append(source)
                    else:
                        target.copy_(source)
        if small_targets:
            torch._foreach_copy_(small_targets, small_sources)

    def _sum(
        self,
        group: PeerGroup,
        flat: list[tuple[Slot, Tensor]],
        word: int,
        turn: tuple[int, int, int],
        small: Tensor,
        sums: list[Tensor],
    ) -> None:
        received, words, own_small = turn
        others, item = self.num_ranks - 1, group.itemsize
        parts = self._view(self.rank, received, others * self._most // item, group.dtype).view(others, -1)
        their_words = self._view(self.rank, words, others, torch.int64)

        def add_up(own: Tensor, start: int, out: Tensor) -> None:
            sum_parts(own, parts[:, start : start + len(own)], their_words, out, rank=self.rank, word=word)

        add_up(self._view(self.rank, own_small, len(small), group.dtype), 0, small)
        for (slot, gradient), one in zip(flat, sums, strict=True):
            if not slot.is_small:
                first, numel = self.rank * slot.numel, slot.numel_of(self.rank)
                add_up(gradient[first : first + numel], slot.start, one[:numel])

    def finish(self) -> None:
        """What is launched from now on comes after the reductions."""
        if self._reduction is not None:
            self.wait(self._reduction[0])
            self._reduction = None


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


# ------------------------------------------------------------------------------------------------------- units


class PeerGroup(FSDPParamGroup):
    """The parameters of one unit, whose shards other ranks read."""

    shards: PeerShards
    ends_last: bool = False
    _arriving: tuple[torch.cuda.Event | None] | None = None

    def lay_out(self) -> None:
        """Where the shards lie in the region of this unit: small ones first. Sizes do not change any more."""
        self.dtype = self.mp_policy.param_dtype
        self.itemsize = self.dtype.itemsize
        self.stored_dtype = self.fsdp_params[0].orig_dtype
        world, end = self.mesh_info.shard_mesh_size, 0
        grain = peer_memory.ALIGNMENT // self.itemsize
        self.slots: list[Slot] = []
        sized = []
        for param in self.fsdp_params:
            rows = -(-param._orig_size[0] // world)
            row = param._orig_size[1:].numel()
            sized.append((rows * row * self.itemsize >= SMALL, rows, row, param))
        for is_large in (False, True):
            for large, rows, row, param in sized:
                if large == is_large:
                    self.slots.append(Slot(param, end, rows, row, not is_large))
                    end = -(-(end + rows * row) // grain) * grain
            if not is_large:
                self.small_region = end
        self.region = end
        self._words: dict[int, Tensor] = {}

    def bind(self, regions: Sequence[Tensor]) -> None:
        """Makes the copies of this rank and the lists of what is copied in a gather.

        Args:
            regions: of this unit, of each rank.
        """
        own = regions[self.shards.rank]
        self.large_copies: list[tuple[Tensor, Tensor]] = []
        self.small_copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        world = self.shards.num_ranks
        for slot in self.slots:
            param = slot.param
            copy = PeerCopy(own[slot.start : slot.start + slot.numel_of(self.shards.rank)], self.shards)
            setattr(param, undivided.COPY, copy)
            param.init_all_gather_outputs([slot.numel], [self.dtype], world, self.device)
            output = param.all_gather_outputs[0]
            # Its own first: what others read from it meanwhile does not compete with it.
            for step in range(world):
                rank = (self.shards.rank + step) % world
                numel = slot.numel_of(rank)
                if numel:
                    target = output[rank * slot.numel : rank * slot.numel + numel]
                    source = regions[rank][slot.start : slot.start + numel]
                    if slot.is_small:
                        self.small_copies[0].append(target)
                        self.small_copies[1].append(source)
                    else:
                        self.large_copies.append((target, source))
            param.free_unsharded_param()

    def word_tensor(self, word: int) -> Tensor:
        """`[1]`, kept: a number on its way to the device would be waited for."""
        if word not in self._words:
            self._words[word] = torch.full((1,), word, dtype=torch.int64, device=self.device)
        return self._words[word]

    @property
    def keeps_copies(self) -> bool:
        """Whether all of it is trained. Decided at the first use."""
        if not hasattr(self, "_keeps_copies"):
            self._keeps_copies = all(param.sharded_param.requires_grad for param in self.fsdp_params)
            if self._keeps_copies:
                self.lay_out()
        return self._keeps_copies

    @torch.no_grad()
    def unshard(self, async_op: bool = False) -> None:
        if not self.keeps_copies:
            super().unshard(async_op)
            return
        is_backward = self._training_state == TrainingState.PRE_BACKWARD
        if self._arriving is not None or self.is_unsharded or (is_backward and not self.unshard_in_backward):
            return
        self.shards.lay_out()
        if not is_backward:  # the forward cast what it needs
            self._cast_what_is_old()
        for param in self.fsdp_params:
            param.alloc_all_gather_outputs()
        self._arriving = (self.shards.gather(self),)

    def _cast_what_is_old(self) -> None:
        trusts_optimizer = self.modules[0].training
        for param in self.fsdp_params:
            parameter, copy = param.sharded_param, getattr(param, undivided.COPY)
            setattr(parameter, undivided.COPY, copy)
            if not (trusts_optimizer and copy.is_current(parameter)):
                copy.before_writing()
                copy.written = None
                copy.tensor.copy_(undivided.local(parameter).reshape(-1))

    def wait_for_unshard(self) -> None:
        if not self.keeps_copies:
            super().wait_for_unshard()
        elif self._arriving is not None:
            (event,), self._arriving = self._arriving, None
            self.shards.wait(event)
            for place, slot in enumerate(self.slots):
                is_new = not hasattr(slot.param, "_unsharded_param")
                slot.param.init_unsharded_param()
                if is_new and self.ends_last and not slot.is_small:
                    hook = partial(
                        _reduce_early, weakref.ref(self), place
                    )  # Python frees no cycle through a tensor's hooks
                    slot.param._unsharded_param.register_post_accumulate_grad_hook(hook)
            self._to_unsharded()

    def post_backward(self, *unused: object) -> None:
        accumulated = any(param.unsharded_accumulated_grad is not None for param in self.fsdp_params)
        if not self.keeps_copies or not self.reduce_grads or accumulated:
            super().post_backward(*unused)
            return
        self._training_state = TrainingState.POST_BACKWARD
        gradients = self._take_gradients()
        if self.reshard_after_backward:
            self.reshard()
        if gradients:
            with torch.no_grad():
                self.shards.reduce(self, gradients)

    def _take_gradients(self) -> list[tuple[Slot, Tensor]]:
        found = []
        for slot in self.slots:
            computed = getattr(slot.param, "_unsharded_param", None)
            if computed is not None and computed.grad is not None:
                found.append((slot, slot.param._get_grad_inner_tensor(computed.grad)))
                computed.grad = None
        return found

    def finalize_backward(self) -> None:
        super().finalize_backward()
        if self.keeps_copies:
            if self._arriving is not None:  # gathered ahead for a backward that did not come
                (event,), self._arriving = self._arriving, None
                self.shards.wait(event)
                for param in self.fsdp_params:
                    param.free_unsharded_param()
            self.shards.finish()


@torch.no_grad()
def _reduce_early(reference: weakref.ref[PeerGroup], place: int, computed: Tensor) -> None:
    """The root's backward ends with the model's, and nothing would hide what it sends: its head is done long before."""
    group = reference()
    param = group.slots[place].param
    if group.reduce_grads and param.unsharded_accumulated_grad is None:
        gradient, computed.grad = param._get_grad_inner_tensor(computed.grad), None
        group.shards.reduce(group, [(group.slots[place], gradient)])
        if group.reshard_after_backward:
            param.free_unsharded_param()  # it was used before its gradient was whole


def install(model: torch.nn.Module, exchange: peer_memory.ShardExchange) -> int:
    """Lets units of a sharded model read their shards from each other's memory; returns how many do. All ranks must call it.

    Args:
        exchange: "auto" is peer memory between GPUs that can have it, in groups that were measured.

    Raises:
        ValueError: peer memory asked for where ranks cannot read each other's, or where no unit can use it.
    """
    if exchange not in ("auto", "collectives", "peer_memory"):
        raise ValueError(f"shard_exchange must be 'auto', 'collectives' or 'peer_memory', not {exchange!r}.")
    if exchange == "collectives":
        return 0
    found: dict[int, list[FSDPParamGroup]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in undivided.param_groups(module):
                if type(group) is FSDPParamGroup and _can_be_read(group):
                    found.setdefault(id(group.mesh_info.shard_process_group), []).append(group)
    if exchange == "peer_memory" and not found:
        raise ValueError(
            "shard_exchange='peer_memory': no parameters are divided over ranks and computed with in a narrower dtype than "
            "they are stored in. Use 'auto'."
        )
    count = 0
    for groups in found.values():
        mesh_info = groups[0].mesh_info
        if peer_memory.is_unavailable(mesh_info.mesh, exchange):
            continue
        members: list[PeerGroup] = []
        shards = PeerShards(mesh_info.shard_process_group, groups[0].device, members)
        for group in groups:
            group.__class__ = PeerGroup
            group.shards = shards
            group.ends_last = model in group.modules
            members.append(group)
        count += len(members)
    return count


def _can_be_read(group: FSDPParamGroup) -> bool:
    """Whether a unit's shards can be read by other ranks; the same answer on every rank."""
    mesh = group.mesh_info
    if type(mesh) is not FSDPMeshInfo or mesh.shard_mesh_size == 1 or group.post_forward_mesh_info not in (None, mesh):
        return False
    computed, summed = group.mp_policy.param_dtype, group.mp_policy.reduce_dtype
    if computed is None or summed != torch.float32:
        return False
    return all(
        param.fsdp_placement.dim == 0
        and not param.offload_to_cpu
        and param.sharded_param.dtype == torch.float32
        and computed.itemsize < param.sharded_param.dtype.itemsize
        and not hasattr(undivided.local(param.sharded_param), "fsdp_pre_all_gather")
        for param in group.fsdp_params
    )
