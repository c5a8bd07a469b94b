"""The meshes and process groups of this rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from patchgen.runtime.parallel import gloo_groups, peer_memory
from patchgen.runtime.parallel.config import ParallelConfig
from patchgen.runtime.parallel.run_context import RunContext


@dataclass(frozen=True, eq=False)
class ParallelState:
    """The meshes, groups and options of this rank; built by `create`, immutable except for `context`.

    The three meshes are views of the same ranks in the same order (`ParallelConfig` draws them):

        data     (data, sp)                        data = dp_replicate * dp_shard: one batch each
        dense    (dp_replicate, fsdp)              fsdp = dp_shard * sp: shards of dense parameters
        expert   (dp_replicate, ep_shard, ep)      shards and owners of experts

    Attributes:
        expert_capacity: the number of rows that a rank sends to each other rank in a token exchange, the same on all ranks
            (an even distribution sends `tokens * experts per token / ep`), or None. With it the exchange needs no host sync;
            rows beyond it are dropped and counted.
        head_groups: the number of groups in which attention heads are exchanged, so that the attention of one group
            overlaps with the exchange of others; lowered to the next number that divides a rank's key heads, to 1 if sp does
            not divide the query heads.
        router_loss: the tokens over which expert loads are counted: those of a "row", or of the whole step ("global"); see
            `router_loss.py`.
        peers: the buffers through which the ranks of an EP group read from each other; None: tokens travel by all-to-all.
        context: what changes while a model runs.
    """

    config: ParallelConfig
    data_mesh: DeviceMesh
    dense_mesh: DeviceMesh
    expert_mesh: DeviceMesh
    expert_capacity: int | None = None
    head_groups: int = 1
    router_loss: Literal["row", "global"] = "row"
    peers: peer_memory.PeerBuffers | None = None
    context: RunContext = field(default_factory=RunContext, repr=False)

    @classmethod
    def create(
        cls,
        config: ParallelConfig,
        device_type: str,
        *,
        expert_capacity: int | None = None,
        head_groups: int = 1,
        router_loss: Literal["row", "global"] = "row",
        expert_exchange: peer_memory.ExpertExchange = "auto",
    ) -> ParallelState:
        """Builds the meshes; every rank must call it.

        Args:
            config: its sizes must multiply to the world size.
            device_type: "cuda" or "cpu".
            expert_exchange: how tokens reach the ranks of their experts. "peer_memory": ranks of one machine read each other's
                memory; "all_to_all": a row per slot is sent, between any ranks; "auto": peer memory between up to four
                GPUs of one machine, unless `expert_capacity` is given.

        Raises:
            ValueError: the sizes do not match the number of ranks, an option has another value than those above, or peer memory
                is unavailable between the ranks.
            RuntimeError: torch.distributed is not initialised.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "ParallelState.create needs torch.distributed: launch with torchrun and call "
                "torch.distributed.init_process_group() first."
            )
        gloo_groups.use_one_worker()  # for the groups created below
        gloo_groups.warn_of_several_workers()
        if expert_capacity is not None and expert_capacity < 1:
            raise ValueError(f"expert_capacity must be at least one row, or None; found {expert_capacity}.")
        if head_groups < 1:
            raise ValueError(f"head_groups must be at least 1 (no overlap); found {head_groups}.")
        if router_loss not in ("row", "global"):
            raise ValueError(f"router_loss must be 'row' or 'global'; found {router_loss!r}.")
        config.require_world(dist.get_world_size())

        mesh = partial(_mesh, device_type)
        expert_mesh = mesh(dp_replicate=config.dp_replicate, ep_shard=config.ep_shard, ep=config.ep)
        return cls(
            config=config,
            data_mesh=mesh(data=config.num_batches, sp=config.sp),
            dense_mesh=mesh(dp_replicate=config.dp_replicate, fsdp=config.num_shards),
            expert_mesh=expert_mesh,
            expert_capacity=expert_capacity,
            head_groups=head_groups,
            router_loss=router_loss,
            peers=peer_memory.expert_buffers(expert_mesh, expert_exchange, has_capacity=expert_capacity is not None),
        )

    @property
    def sp(self) -> int:
        """The number of ranks that share a sequence."""
        return self.config.sp

    @property
    def ep(self) -> int:
        """The number of groups of experts."""
        return self.config.ep

    @property
    def sp_rank(self) -> int:
        """The index of this rank's slice of the sequence."""
        return self.data_mesh.get_local_rank("sp")

    @property
    def batch_index(self) -> int:
        """The index of this rank's batch among the `num_batches` of a micro-step."""
        return self.data_mesh.get_local_rank("data")

    @property
    def sp_group(self) -> dist.ProcessGroup:
        return self.data_mesh.get_group("sp")

    @property
    def ep_group(self) -> dist.ProcessGroup:
        return self.expert_mesh.get_group("ep")

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh of dense parameters: `fsdp`, with replicas `(dp_replicate, fsdp)`."""
        return self.dense_mesh["fsdp"] if self.config.dp_replicate == 1 else self.dense_mesh["dp_replicate", "fsdp"]

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """The FSDP2 mesh of experts: `ep_shard`, with replicas `(dp_replicate, ep_shard)`."""
        if self.config.dp_replicate == 1:
            return self.expert_mesh["ep_shard"]
        return self.expert_mesh["dp_replicate", "ep_shard"]

    @property
    def ep_mesh(self) -> DeviceMesh:
        """The mesh of the expert dimension: `ep`."""
        return self.expert_mesh["ep"]


_MESHES: dict[tuple, DeviceMesh] = {}


def _mesh(device_type: str, **dimensions: int) -> DeviceMesh:
    """The mesh of all ranks with these dimensions, created once: states of one layout share it.

    Each mesh creates a process group per dimension, and holds them and the default group: with gloo each costs a thread that
    wakes a hundred times a second, with NCCL device memory. Those of a default group that was replaced are dropped here.
    """
    world = dist.group.WORLD
    if world is None:
        raise ValueError("A mesh needs running ranks. To fix: call torch.distributed.init_process_group first.")
    for replaced in [key for key in _MESHES if key[0] is not world]:
        del _MESHES[replaced]
    key = (world, device_type, *dimensions.items())
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh(device_type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    return _MESHES[key]
