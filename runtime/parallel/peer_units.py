"""FSDP2 units whose parameters the ranks of one machine read from each other's memory (`peer_shards.py`).

A unit is left to FSDP2 unless it is stored in fp32, computed in a narrower dtype and its gradients are summed in fp32; if some
of it is frozen, replicated as well, in host memory, or sharded along another dimension than the first; and in a backward that
ends gradient accumulation without reduction. From torch 2.15 on, which rebuilt what is read here of FSDP2, every unit is.
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
from patchgen.runtime.parallel.peer_shards import PeerCopy, PeerShards, ShardSlot
from patchgen.runtime.parallel.unused import ZeroFillingGroup

ATTRIBUTE = "_patchgen_units_in_peer_memory"  # on a sharded model: their number
IS_REBUILT = torch.__version__ >= "2.15.0.dev0"
SMALL_BYTES = 2**25
"""Bytes of a shard. Smaller ones are copied together by one kernel, because launching a copy, some ten microseconds on the host,
takes longer than the copy; and they are summed together."""


class PeerGroup(ZeroFillingGroup):
    """The parameter group of one unit, whose shards other ranks read."""

    shards: PeerShards
    mesh_info: FSDPMeshInfo
    dtype: torch.dtype
    """The compute dtype of the unit."""
    _pending_gather: tuple[torch.Event | None] | None = None

    def plan_layout(self) -> None:
        """Assigns the places of shards in the region of this unit, small ones first."""
        assert self.mp_policy.param_dtype is not None, "checked by `_readable_mesh`"
        self.dtype = self.mp_policy.param_dtype
        self.itemsize = self.dtype.itemsize
        self.stored_dtype = self.fsdp_params[0].orig_dtype
        world, end = self.mesh_info.shard_mesh_size, 0
        grain = peer_memory.ALIGNMENT // self.itemsize
        self.slots: list[ShardSlot] = []
        sized = []
        for param in self.fsdp_params:
            rows = -(-param._orig_size[0] // world)
            row_numel = param._orig_size[1:].numel()
            sized.append((rows * row_numel * self.itemsize >= SMALL_BYTES, rows, row_numel, param))
        for is_large in (False, True):
            for large, rows, row_numel, param in sized:
                if large == is_large:
                    self.slots.append(ShardSlot(param, end, rows, row_numel, not is_large))
                    end = -(-(end + rows * row_numel) // grain) * grain
            if not is_large:
                self.small_region = end
        self.region = end
        self._tags: dict[int, Tensor] = {}
        # In reverse: the order of the backward, and the same on ranks that lack some gradient.
        self._large = [index for index, slot in enumerate(self.slots) if not slot.is_small][::-1]
        self._complete: set[int] = set()  # indices of large gradients that this backward has computed
        self._reduced_early: set[FSDPParam] = set()  # those already reduced
        self._storage_users: dict[int, int] = {}

    def create_copies(self, regions: Sequence[Tensor]) -> None:
        """Creates this rank's copies and the copy lists of a gather, from the region of this unit on each rank."""
        local_region = regions[self.shards.rank]
        self.large_copies: list[tuple[Tensor, Tensor]] = []
        self.small_copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        world = self.shards.num_ranks
        for slot in self.slots:
            param = slot.param
            copy = PeerCopy(local_region[slot.start : slot.start + slot.numel_of(self.shards.rank)], self.shards)
            setattr(param, undivided.COPY, copy)
            param.init_all_gather_outputs([slot.numel], [self.dtype], world, self.device)
            output = param.all_gather_outputs[0]
            # The local shard first: its copy does not compete with reads over the link.
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

    def tag_of(self, slots: Iterable[ShardSlot]) -> int:
        """A tag that identifies the gradients of these slots, so that ranks detect that they sum different ones."""
        places = sum(1 << self.slots.index(slot) for slot in slots)
        return 1 + (self.number * 1_000_003 + places) % (2**61 - 2)

    def tag_tensor(self, tag: int) -> Tensor:
        """`[1]` on the device, cached because copying a number there would wait."""
        if tag not in self._tags:
            self._tags[tag] = torch.full((1,), tag, dtype=torch.int64, device=self.device)
        return self._tags[tag]

    @property
    def keeps_copies(self) -> bool:
        """Whether all parameters are trained; decided at first use, which plans the layout as well."""
        if not hasattr(self, "_keeps_copies"):
            self._keeps_copies = all(param.sharded_param.requires_grad for param in self.fsdp_params)
            if self._keeps_copies:
                self.plan_layout()
        return self._keeps_copies

    @torch.no_grad()
    def unshard(self, async_op: bool = False) -> None:
        if not self.keeps_copies:
            super().unshard(async_op)
            return
        is_backward = self._training_state == TrainingState.PRE_BACKWARD
        if self._pending_gather is not None or self.is_unsharded or (is_backward and not self.unshard_in_backward):
            return
        self.shards.allocate()
        if not is_backward:  # before a backward, the forward has updated the copies
            self._update_stale_copies()
        for param in self.fsdp_params:
            param.alloc_all_gather_outputs()
        self._pending_gather = (self.shards.gather(self),)

    def _update_stale_copies(self) -> None:
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
        elif self._pending_gather is not None:
            (event,), self._pending_gather = self._pending_gather, None
            self.shards.wait(event)
            for index, slot in enumerate(self.slots):
                is_new = not hasattr(slot.param, "_unsharded_param")
                slot.param.init_unsharded_param()
                if is_new and not slot.is_small:
                    # Weak, because Python does not free cycles through a tensor's hooks.
                    hook = partial(_on_large_gradient, weakref.ref(self), index)
                    slot.param._unsharded_param.register_post_accumulate_grad_hook(hook)
                    self._storage_users[index] = _num_storage_users(slot.param)  # before any use
            self._to_unsharded()

    def post_backward(self, *unused: object) -> None:
        if not self.keeps_copies or not self.reduce_grads or self.has_accumulated:
            super().post_backward(*unused)
            return
        self._training_state = TrainingState.POST_BACKWARD
        is_last = self.end_run()
        if is_last:
            self.fill_missing_gradients()
        gradients = self._take_gradients() if is_last else []
        if self.reshard_after_backward:
            self.reshard()
        if not is_last:
            return
        # The same number of reductions on every rank: each waits for the others.
        to_reduce = [[slot] for index in self._large if (slot := self.slots[index]).param not in self._reduced_early]
        to_reduce += [small] if (small := [slot for slot in self.slots if slot.is_small]) else []
        self._reduced_early.clear()
        self._complete.clear()
        with torch.no_grad():
            for slots in to_reduce:
                self._note_sum(slots[0])
                if pairs := [pair for pair in gradients if pair[0] in slots]:
                    self.shards.reduce(self, pairs)
                else:
                    self.shards.reduce_without_gradient(self, slots)

    def reduce_early(self, index: int) -> None:
        """Sums a gradient before the unit's backward ends, and frees its parameter if nothing will use it any more.

        A layer's experts are done before its attention, and the root's head before all layers, whose backward overlaps with
        the reduction.
        """
        slot = self.slots[index]
        param = slot.param
        computed = param._unsharded_param
        assert computed.grad is not None, "checked by the caller"
        gradient, computed.grad = param._get_grad_inner_tensor(computed.grad), None
        if self.reshard_after_backward and _num_storage_users(param) == self._storage_users[index]:
            param.free_unsharded_param()  # before the sum is allocated
        self._reduced_early.add(param)
        self._note_sum(slot)
        self.shards.reduce(self, [(slot, gradient)])

    def _note_sum(self, slot: ShardSlot) -> None:
        name = f"small gradients of {self._module_fqn or 'the root'}" if slot.is_small else slot.param._param_fqn
        self.peer_sums.note(self.tag_of([slot]), "sum", name or "a parameter")

    def _take_gradients(self) -> list[tuple[ShardSlot, Tensor]]:
        gradients = []
        for slot in self.slots:
            computed = getattr(slot.param, "_unsharded_param", None)
            if computed is not None and computed.grad is not None:
                gradients.append((slot, slot.param._get_grad_inner_tensor(computed.grad)))
                computed.grad = None
        return gradients

    def finalize_backward(self) -> None:
        super().finalize_backward()
        if self.keeps_copies:
            self._reduced_early.clear()
            self._complete.clear()
            if self._pending_gather is not None:  # gathered ahead for a backward that did not come
                (event,), self._pending_gather = self._pending_gather, None
                self.shards.wait(event)
                for param in self.fsdp_params:
                    param.free_unsharded_param()
            self.shards.finish()


@torch.no_grad()
def _on_large_gradient(reference: weakref.ref[PeerGroup], index: int, _: Tensor) -> None:
    """Reduces large gradients in order: each when it and all earlier ones are complete."""
    group = reference()
    if group is None:
        raise RuntimeError("A gradient was computed for a unit that was freed.")
    if not group.reduce_grads or group.has_accumulated:
        return
    group._complete.add(index)
    for earlier in group._large:
        if earlier not in group._complete:
            return
        if group.slots[earlier].param._unsharded_param.grad is not None:
            group.reduce_early(earlier)


def _num_storage_users(param: FSDPParam) -> int:
    """The number of tensors that share the memory of a gathered parameter, including those saved for backward."""
    return torch._C._storage_Use_Count(param.all_gather_outputs[0].untyped_storage()._cdata)


def install(model: torch.nn.Module, exchange: peer_memory.ShardExchange) -> int:
    """Lets units of a sharded model use peer memory; returns how many do. All ranks must call it.

    Args:
        exchange: "auto" is peer memory between GPUs that support it, in groups that were measured.

    Raises:
        ValueError: an unknown `exchange`; or peer memory was requested but is unavailable (in torch 2.15), or no unit can use it.
    """
    if exchange not in ("auto", "collectives", "peer_memory"):
        raise ValueError(f"shard_exchange must be 'auto', 'collectives' or 'peer_memory', not {exchange!r}.")
    if exchange == "peer_memory" and IS_REBUILT:
        raise ValueError(
            f"shard_exchange='peer_memory' is unavailable: torch {torch.__version__} rebuilt the parameter groups of FSDP2. "
            "To fix: use 'auto' or 'collectives', or torch before 2.15."
        )
    if exchange == "collectives" or IS_REBUILT:
        return 0
    candidates: dict[dist.ProcessGroup, list[FSDPParamGroup]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in undivided.param_groups(module):
                mesh_info = _readable_mesh(group) if type(group) is FSDPParamGroup else None
                if mesh_info is not None:
                    candidates.setdefault(mesh_info.shard_process_group, []).append(group)
    if exchange == "peer_memory" and not candidates:
        raise ValueError(
            "shard_exchange='peer_memory': no parameters are sharded and have a narrower compute dtype than fp32, in which they "
            "must be stored and their gradients summed; nor may they be in host memory, sharded along another dimension than the "
            "first, or gathered in a way of their own. To fix: use 'auto'."
        )
    count = 0
    for ranks, groups in candidates.items():
        if peer_memory.shards_use_collectives(groups[0].mesh_info.mesh, exchange):
            continue
        members: list[PeerGroup] = []
        shards = PeerShards(ranks, groups[0].device, members)
        for group in groups:
            group.__class__ = PeerGroup
            assert isinstance(group, PeerGroup), "just set"
            group.shards = shards
            members.append(group)
        count += len(members)
    return count


def _readable_mesh(group: FSDPParamGroup) -> FSDPMeshInfo | None:
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
