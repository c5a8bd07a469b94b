"""Units of FSDP2 whose parameters the ranks of one host read from each other's memory (`peer_shards.py`).

A unit is left to FSDP2 where it is not stored in a wider dtype than it computes in, is not all trained, is replicated too, or
lies in host memory; and in a backward that ends gradients accumulated without reduction.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from patchgen.runtime.parallel import peer_memory, undivided
from patchgen.runtime.parallel.peer_shards import PeerCopy, PeerShards, Slot
from patchgen.runtime.parallel.unused import FilledGroup

ATTRIBUTE = "_patchgen_units_in_peer_memory"  # of a sharded model: how many
SMALL = 2**25
"""Bytes of a shard. Smaller ones are copied together in one kernel: what a host spends on a copy engine's order, some ten
microseconds, is longer than their way; and they are summed as one."""


class PeerGroup(FilledGroup):
    """The parameters of one unit, whose shards other ranks read."""

    shards: PeerShards
    mesh_info: FSDPMeshInfo
    dtype: torch.dtype
    """What the unit computes in."""
    _arriving: tuple[torch.Event | None] | None = None

    def lay_out(self) -> None:
        """Where the shards lie in the region of this unit: small ones first. Sizes do not change any more."""
        assert self.mp_policy.param_dtype is not None, "`_readable` says so"
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
        # From the last: the order in which a backward has them, and the same on ranks that lack one of them.
        self._large = [place for place, slot in enumerate(self.slots) if not slot.is_small][::-1]
        self._whole: set[int] = set()  # places of large gradients that this backward has computed
        self._left_early: set[FSDPParam] = set()  # those of them that left
        self._holders: dict[int, int] = {}

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

    def word_of(self, slots: Iterable[Slot]) -> int:
        """What gradients are of: ranks that sum others' say another word."""
        places = sum(1 << self.slots.index(slot) for slot in slots)
        return 1 + (self.number * 1_000_003 + places) % (2**61 - 2)

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
                if is_new and not slot.is_small:
                    # Weak, for Python frees no cycle through a tensor's hooks.
                    hook = partial(_reduce_early, weakref.ref(self), place)
                    slot.param._unsharded_param.register_post_accumulate_grad_hook(hook)
                    self._holders[place] = _num_holders(slot.param)  # nothing has computed with it yet
            self._to_unsharded()

    def post_backward(self, *unused: object) -> None:
        if not self.keeps_copies or not self.reduce_grads or self.has_accumulated:
            super().post_backward(*unused)
            return
        self._training_state = TrainingState.POST_BACKWARD
        is_last = self.ends()
        if is_last:
            self.fill_up()
        gradients = self._take_gradients() if is_last else []
        if self.reshard_after_backward:
            self.reshard()
        if not is_last:
            return
        # On every rank as often: each waits for the others.
        waiting = [[slot] for place in self._large if (slot := self.slots[place]).param not in self._left_early]
        waiting += [small] if (small := [slot for slot in self.slots if slot.is_small]) else []
        self._left_early.clear()
        self._whole.clear()
        with torch.no_grad():
            for slots in waiting:
                if pairs := [pair for pair in gradients if pair[0] in slots]:
                    self.shards.reduce(self, pairs)
                else:
                    self.shards.reduce_nothing(self, slots)

    def send_early(self, place: int) -> None:
        """Sums a gradient before the unit's backward ends, and frees its parameter unless something will still compute with it:
        a layer's experts are done before its attention, and the root's head before all layers, whose backward hides what
        they send."""
        slot = self.slots[place]
        param = slot.param
        computed = param._unsharded_param
        assert computed.grad is not None, "asked by the caller"
        gradient, computed.grad = param._get_grad_inner_tensor(computed.grad), None
        if self.reshard_after_backward and _num_holders(param) == self._holders[place]:
            param.free_unsharded_param()  # the sum takes its place
        self._left_early.add(param)
        self.shards.reduce(self, [(slot, gradient)])

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
            self._left_early.clear()
            self._whole.clear()
            if self._arriving is not None:  # gathered ahead for a backward that did not come
                (event,), self._arriving = self._arriving, None
                self.shards.wait(event)
                for param in self.fsdp_params:
                    param.free_unsharded_param()
            self.shards.finish()


@torch.no_grad()
def _reduce_early(reference: weakref.ref[PeerGroup], place: int, _: Tensor) -> None:
    """A large gradient leaves when it is whole and those behind it have left."""
    group = reference()
    if group is None:
        raise RuntimeError("A gradient came whose unit is gone.")
    if not group.reduce_grads or group.has_accumulated:
        return
    group._whole.add(place)
    for other in group._large:
        if other not in group._whole:
            return
        if group.slots[other].param._unsharded_param.grad is not None:
            group.send_early(other)


def _num_holders(param: FSDPParam) -> int:
    """How many tensors share the memory of a gathered parameter: those that a backward will read, too."""
    return torch._C._storage_Use_Count(param.all_gather_outputs[0].untyped_storage()._cdata)


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
    found: dict[dist.ProcessGroup, list[FSDPParamGroup]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in undivided.param_groups(module):
                mesh_info = _readable(group) if type(group) is FSDPParamGroup else None
                if mesh_info is not None:
                    found.setdefault(mesh_info.shard_process_group, []).append(group)
    if exchange == "peer_memory" and not found:
        raise ValueError(
            "shard_exchange='peer_memory': no parameters are divided over ranks and computed with in a narrower dtype than "
            "they are stored in. Use 'auto'."
        )
    count = 0
    for ranks, groups in found.items():
        if peer_memory.is_unavailable(groups[0].mesh_info.mesh, exchange):
            continue
        members: list[PeerGroup] = []
        shards = PeerShards(ranks, groups[0].device, members)
        for group in groups:
            group.__class__ = PeerGroup
            assert isinstance(group, PeerGroup), "from here on"
            group.shards = shards
            members.append(group)
        count += len(members)
    return count


def _readable(group: FSDPParamGroup) -> FSDPMeshInfo | None:
    """The mesh of a unit whose shards other ranks can read, else None; the same answer on every rank."""
    mesh = group.mesh_info
    if type(mesh) is not FSDPMeshInfo or mesh.shard_mesh_size == 1 or group.post_forward_mesh_info not in (None, mesh):
        return None
    computed, summed = group.mp_policy.param_dtype, group.mp_policy.reduce_dtype
    if computed is None or summed != torch.float32:
        return None
    can_be_read = all(
        param.fsdp_placement.dim == 0
        and not param.offload_to_cpu
        and param.sharded_param.dtype == torch.float32
        and computed.itemsize < param.sharded_param.dtype.itemsize
        and not hasattr(undivided.local(param.sharded_param), "fsdp_pre_all_gather")
        for param in group.fsdp_params
    )
    return mesh if can_be_read else None
