"""Gradients travel in the dtype they were computed in, and are summed in fp32 where they arrive.

    reduce-scatter in fp32    every gradient is widened, then travels and is summed on the way    4 bytes per element
    exchange, then sum        every rank sends each other rank its part, as it is                 2 bytes, in bf16

Widening a bf16 gradient adds nothing to it, so both sum the same numbers in the same precision. The order here is that
of the ranks, whatever the library of collectives does. Used by FSDP2 in place of its reduce-scatter.
"""

from __future__ import annotations

import functools
import inspect
import socket
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from patchgen.runtime.parallel.collectives import gather_objects
from patchgen.runtime.parallel.state import ParallelState

ATTRIBUTE = "_patchgen_gradient_exchanges"  # of a sharded model: its exchanges
_FILLED_BY_COPIES = "_patchgen_filled_by_copies"  # of a buffer that an exchange sends


class ExchangeReduce(ReduceScatter):
    """A reduce-scatter over `world` ranks, for one unit of FSDP2; sums only.

    Args:
        world: ranks of the group, at least two: FSDP2 asks for an input, then for an output of `1 / world` of its size.
        sent_dtype: what gradients are computed in, and travel in.
    """

    def __init__(self, world: int, sent_dtype: torch.dtype) -> None:
        self.world = world
        self.sent_dtype = sent_dtype
        self.as_computed = True  # False: gradients were accumulated in the dtype of the sum, and travel in it
        self._awaited_output: int | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input in `sent_dtype`, then the output in `dtype`, that of the sum."""
        (numel,) = size
        is_output = self._awaited_output is not None
        if is_output and numel != self._awaited_output:
            raise RuntimeError(
                f"FSDP2 was expected to ask for an output of {self._awaited_output} elements after its input, and asks for "
                f"{numel}: this torch ({torch.__version__}) reduces in another way. Set exchange_gradients=False."
            )
        self._awaited_output = None if is_output else numel // self.world
        narrow = self.as_computed and not is_output
        buffer = torch.empty(numel, dtype=self.sent_dtype if narrow else dtype, device=device)
        if not is_output:
            setattr(buffer, _FILLED_BY_COPIES, True)
        return buffer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """`output_tensor [N]` becomes the sum over ranks of their `input_tensor [world, N]` at this rank."""
        if op != dist.ReduceOp.SUM or async_op:
            raise NotImplementedError(f"Gradients are summed by an exchange, at once; asked for {op}, {async_op=}.")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(self.world, -1), dim=0, dtype=output_tensor.dtype, out=output_tensor)


def install(
    model: nn.Module,
    state: ParallelState,
    experts: Sequence[nn.Module],
    kept: Sequence[nn.Module],
    *,
    computed: torch.dtype | None,
    summed: torch.dtype | None,
    wanted: bool | None,
) -> list[ExchangeReduce]:
    """Lets units of a sharded model exchange their gradients, where these are narrower than their sum.

    Args:
        experts: units whose shards lie on the expert mesh.
        kept: units that are computed and summed in fp32: nothing to save.
        computed, summed: dtypes of gradients and of their sum; None: that of the parameters, and as computed.
        wanted: None: on GPUs, in groups that each share a host. Between hosts many small messages may lose to a ring,
            which is not measured. Every rank gets the same answer.

    Raises:
        ValueError: wanted, where no unit has bytes to save.
    """
    narrow = computed if computed is not None and summed is not None and computed.itemsize < summed.itemsize else None
    asked = wanted is None and state.dense_mesh.device_type == "cuda"
    own_mesh, as_is = {id(module) for module in experts}, {id(module) for module in kept}
    hosts = gather_objects(socket.gethostname()) if narrow is not None and asked else []
    exchanges = []
    _replace_copy_in()
    for is_expert, mesh, dimension in ((False, state.dense_mesh, "fsdp"), (True, state.expert_mesh, "ep_shard")):
        world = mesh.size(place_of(mesh, dimension))
        if narrow is None or world == 1 or not (wanted or (asked and share_hosts(mesh, dimension, hosts))):
            continue
        for module in model.modules():
            if isinstance(module, FSDPModule) and id(module) not in as_is and (id(module) in own_mesh) == is_expert:
                exchanges.append(ExchangeReduce(world, narrow))
                module.set_custom_reduce_scatter(exchanges[-1])
    if wanted and not exchanges:
        why = "no gradients are divided over ranks" if narrow is not None else "there are no bytes to save"
        raise ValueError(
            f"exchange_gradients: gradients are computed in {computed or 'the dtype of the parameters'} and summed in "
            f"{summed or 'the same'}, over {dist.get_world_size()} rank(s): {why}. Leave it out, or set param_dtype=bfloat16 "
            "and reduce_dtype=float32 on several shards."
        )
    return exchanges


def place_of(mesh: DeviceMesh, dimension: str) -> int:
    """Which dimension of a mesh has this name."""
    return (mesh.mesh_dim_names or ()).index(dimension)


def fill(gradients: Sequence[Tensor], buffer: Tensor, world: int) -> None:
    """Writes gradients `[D, ...]` into `buffer [world * N]` as FSDP2 does: of each its part for a rank beside the others'.

    Rows that do not divide by `world` are filled up with zeros.
    """
    parts = buffer.view(world, -1)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    start = 0
    for gradient in gradients:
        rows = -(-gradient.shape[0] // world)
        size = rows * gradient[:1].numel() if gradient.shape[0] else 0
        flat = gradient.contiguous().view(-1)
        for rank in range(world):
            target, source = parts[rank, start : start + size], flat[rank * size : (rank + 1) * size]
            target[source.numel() :].zero_()
            targets.append(target[: source.numel()])
            sources.append(source)
        start += size
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _fill_by_copies(copy_in: Callable[..., None]) -> Callable[..., None]:
    """FSDP2's function, for buffers of an exchange `fill`."""

    @functools.wraps(copy_in)
    def filled(unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int) -> None:
        ours = getattr(reduce_scatter_input, _FILLED_BY_COPIES, False)
        (fill if ours else copy_in)(unsharded_grads, reduce_scatter_input, world_size)

    return filled


def _replace_copy_in() -> None:
    """Lets FSDP2 fill the buffers of exchanges by `fill`; where its function takes something else, it keeps its own."""
    own = _fsdp_collectives.foreach_reduce_scatter_copy_in
    known = tuple(inspect.signature(own).parameters) == ("unsharded_grads", "reduce_scatter_input", "world_size")
    if known and not hasattr(own, "__wrapped__"):
        _fsdp_collectives.foreach_reduce_scatter_copy_in = _fill_by_copies(own)


def share_hosts(mesh: DeviceMesh, dimension: str, hosts: Sequence[str]) -> bool:
    """Whether the ranks of each group along a dimension of a mesh of all ranks run on one host.

    Args:
        hosts: the host of each rank.
    """
    place = place_of(mesh, dimension)
    groups = mesh.mesh.movedim(place, -1).reshape(-1, mesh.mesh.shape[place])
    return all(len({hosts[rank] for rank in group}) == 1 for group in groups.tolist())
