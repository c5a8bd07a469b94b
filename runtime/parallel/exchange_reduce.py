"""Gradient reduction by all-to-all in the compute dtype and a local sum in fp32, instead of FSDP2's reduce-scatter.

    reduce-scatter in fp32    gradients are cast to fp32, sent, and summed on the way    4 bytes per element
    all-to-all, then sum      each rank sends each other rank its part, uncast           2 bytes, in bf16

Casting a bf16 gradient to fp32 is exact, so both sum the same numbers in the same precision. The order of the sum here is
rank order, whatever the collective library does.
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
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from patchgen.runtime.parallel import undivided
from patchgen.runtime.parallel.collectives import gather_objects
from patchgen.runtime.parallel.state import ParallelState

ATTRIBUTE = "_patchgen_gradient_exchanges"  # on a sharded model: its exchanges
_COPIED_BY_FOREACH = "_patchgen_filled_by_copies"  # on the send buffer of an exchange


class ExchangeReduce(ReduceScatter):
    """A reduce-scatter over `world` ranks, for one unit of FSDP2; sums only.

    Args:
        world: ranks of the group, at least two: FSDP2 asks for an input, then for an output of `1 / world` of its size.
        compute_dtype: the dtype in which gradients are computed and sent.
    """

    def __init__(self, world: int, compute_dtype: torch.dtype) -> None:
        self.world = world
        self.compute_dtype = compute_dtype
        self.sends_compute_dtype = (
            True  # False: gradients were accumulated in the dtype of the sum, and are sent in it
        )
        self._expected_output: int | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input in `compute_dtype`, then the output in `dtype`, the dtype of the sum."""
        (numel,) = size
        is_output = self._expected_output is not None
        if is_output and numel != self._expected_output:
            raise RuntimeError(
                f"FSDP2 was expected to allocate an output of {self._expected_output} elements after its input; found "
                f"{numel}: this torch ({torch.__version__}) reduces differently. To fix: set exchange_gradients=False."
            )
        self._expected_output = None if is_output else numel // self.world
        narrow = self.sends_compute_dtype and not is_output
        buffer = torch.empty(numel, dtype=self.compute_dtype if narrow else dtype, device=device)
        if not is_output:
            setattr(buffer, _COPIED_BY_FOREACH, True)
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
            raise NotImplementedError(f"Gradient exchanges compute sums, synchronously; found {op}, {async_op=}.")
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(self.world, -1), dim=0, dtype=output_tensor.dtype, out=output_tensor)


def install(
    model: nn.Module,
    state: ParallelState,
    experts: Sequence[nn.Module],
    fp32_units: Sequence[nn.Module],
    *,
    compute_dtype: torch.dtype | None,
    sum_dtype: torch.dtype | None,
    enabled: bool | None,
) -> list[ExchangeReduce]:
    """Replaces the reduce-scatter of units whose gradients are narrower than their sum.

    Args:
        experts: units sharded over the expert mesh.
        fp32_units: units that are computed and summed in fp32, which have nothing to save.
        compute_dtype, sum_dtype: of gradients and of their sum; None: the dtype of parameters, and of gradients.
        enabled: None: on GPUs, in groups that share a host. Between hosts many small messages may be slower than a ring,
            which is not measured. The decision is the same on every rank.

    Raises:
        ValueError: `enabled` is True and no unit has bytes to save.
    """
    narrow = None
    if compute_dtype is not None and sum_dtype is not None and compute_dtype.itemsize < sum_dtype.itemsize:
        narrow = compute_dtype
    is_auto = enabled is None and state.dense_mesh.device_type == "cuda"
    expert_ids, fp32_ids = {id(module) for module in experts}, {id(module) for module in fp32_units}
    hosts = gather_objects(socket.gethostname()) if narrow is not None and is_auto else []
    exchanges = []
    _replace_copy_in()
    for is_expert, mesh, dimension in ((False, state.dense_mesh, "fsdp"), (True, state.expert_mesh, "ep_shard")):
        world = mesh.size(mesh_dimension(mesh, dimension))
        if narrow is None or world == 1 or not (enabled or (is_auto and groups_share_hosts(mesh, dimension, hosts))):
            continue
        for module in model.modules():
            in_group = id(module) not in fp32_ids and (id(module) in expert_ids) == is_expert
            if isinstance(module, FSDPModule) and in_group:
                exchanges.append(ExchangeReduce(world, narrow))
                wide = {group: group._reduce_scatter_comm for group in _wide_groups(module, narrow)}
                module.set_custom_reduce_scatter(exchanges[-1])
                for group, before in wide.items():
                    group._reduce_scatter_comm = before
    if enabled and not exchanges:
        reason = "no gradients are sharded" if narrow is not None else "there are no bytes to save"
        raise ValueError(
            f"exchange_gradients: gradients are computed in {compute_dtype or 'the dtype of the parameters'} and summed in "
            f"{sum_dtype or 'the same'}, over {dist.get_world_size()} rank(s): {reason}. To fix: remove it, or set "
            "param_dtype=bfloat16 and reduce_dtype=float32 on several shards."
        )
    return exchanges


def _wide_groups(unit: FSDPModule, narrow: torch.dtype) -> list[FSDPParamGroup]:
    """The groups of a unit whose gradients are computed in another dtype (`fp32_parameters.py`)."""
    return [group for group in undivided.param_groups(unit) if group.mp_policy.param_dtype != narrow]


def mesh_dimension(mesh: DeviceMesh, dimension: str) -> int:
    """The index of a mesh dimension by its name."""
    return (mesh.mesh_dim_names or ()).index(dimension)


def copy_in_gradients(gradients: Sequence[Tensor], buffer: Tensor, world: int) -> None:
    """Copies gradients `[rows, ...]` into `buffer [world * N]` in FSDP2's layout: per rank its parts of all gradients.

    Each gradient is padded with zeros to a multiple of `world` rows.
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


def _copy_in_for_exchanges(copy_in: Callable[..., None]) -> Callable[..., None]:
    """FSDP2's function, replaced by `copy_in_gradients` for the buffers of exchanges."""

    @functools.wraps(copy_in)
    def wrapped(unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int) -> None:
        by_foreach = getattr(reduce_scatter_input, _COPIED_BY_FOREACH, False)
        (copy_in_gradients if by_foreach else copy_in)(unsharded_grads, reduce_scatter_input, world_size)

    return wrapped


def _replace_copy_in() -> None:
    """Patches FSDP2 to fill the buffers of exchanges by `copy_in_gradients`, if its function has the known parameters."""
    original = _fsdp_collectives.foreach_reduce_scatter_copy_in
    is_known = tuple(inspect.signature(original).parameters) == (
        "unsharded_grads",
        "reduce_scatter_input",
        "world_size",
    )
    if is_known and not hasattr(original, "__wrapped__"):
        _fsdp_collectives.foreach_reduce_scatter_copy_in = _copy_in_for_exchanges(original)


def groups_share_hosts(mesh: DeviceMesh, dimension: str, hosts: Sequence[str]) -> bool:
    """Whether each group along a mesh dimension runs on one host; `hosts` has the host of each rank."""
    index = mesh_dimension(mesh, dimension)
    groups = mesh.mesh.movedim(index, -1).reshape(-1, mesh.mesh.shape[index])
    return all(len({hosts[rank] for rank in group}) == 1 for group in groups.tolist())
