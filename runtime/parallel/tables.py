"""Row-sharded tables: embeddings too large to be gathered. Ids travel to the rank of their row, rows come back.

Example: a table of 5 rows on 2 ranks.

    rank 0, owns rows 0 1 2                         rank 1, owns rows 3 4
    ids      4 0 4 1                                ids      3 1
    sent     each id once, sorted: 0 1 | 4          1 | 3
    wanted   0 1, and 1 of rank 1                   4 of rank 0, and 3
    rows     back in the same order, then each token copies the row of its id

In the backward a token's gradients are summed per id, sent to the owner, and added to its gradient, rank after rank, in fp32:
the sums do not depend on timing. The gradient is a dense shard, so any optimizer takes it and its states lie where the rows do:
AdamW moves rows without a gradient, too, as it does in one process. A sparse gradient would need an optimizer with other results.

Rows are sharded over all ranks, over replicas (HSDP), too: there is then nothing to sum between replicas. Weights are
DTensors, so that norm, checkpoints and exports treat them as any other.

    T ids of this rank   U different ones   Q rows that ranks want of this one   W width of a row   n ranks
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from patchgen.runtime.parallel import checkpointing, undivided, watch
from patchgen.runtime.parallel.collectives import all_to_all
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.parallel_plan import find_tables
from patchgen.runtime.uncompiled import uncompiled

ABOVE = 2**31
"""Parameters up to which a table is gathered. Beyond, in bf16 the gathered weight and its gradient would take 4 GiB each. The
embeddings of vocabularies are smaller (262k rows of 5,376: 1.4e9): for them an exchange with a host sync would gain little."""
_STORED = "_stored_weight"  # on a table whose class overrides forward: the weight, while that forward sees a stand-in


@dataclass(frozen=True)
class ShardedRows:
    """How the rows of a table are sharded and sent.

    Attributes:
        name: the path of the weight, for reports of stalls.
        group: of the ranks, in the order of their rows.
        first_rows: the first row of each rank, and the number of rows: n + 1 numbers. Ranks may have no rows.
        dtype: that layers compute in, in which rows are sent.
    """

    name: str
    group: dist.ProcessGroup
    first_rows: tuple[int, ...]
    dtype: torch.dtype


class ShardedTable(nn.Embedding):
    """The look-up in a table whose rows are sharded. It becomes the last base of an embedding's class before `nn.Embedding`, so
    that a class that scales what `super().forward` returns still does.

    Raises:
        IndexError: on all ranks, an id of any of them that is no row of the table.
    """

    sharded_rows: ShardedRows
    weight: nn.Parameter  # pyright: ignore[reportIncompatibleVariableOverride]  # a Tensor for nn.Embedding's type

    def forward(self, input: Tensor) -> Tensor:
        """`[..., W]`, in the dtype of computing, for ids `[...]`. Every rank must call it, with any number of ids."""
        return look_up(self, input)


@dataclass(frozen=True)
class _Route:
    """Which rows are sent, remembered when a checkpointed layer is computed again.

    Attributes:
        place_T: the place of each id among the different ones.
        wanted_Q: this rank's rows, counted from its first, that ranks want, in rank order, each once per rank.
        send_sizes, receive_sizes: rows wanted of each rank, and by each rank.
    """

    place_T: Tensor
    wanted_Q: Tensor
    send_sizes: list[int]
    receive_sizes: list[int]


# ---------------------------------------------------------------------------------------------- sharding


def choose(model: nn.Module, above: int | None, *, world: int) -> tuple[list[str], dict[str, str]]:
    """The tables of more parameters than `above` (None: none), and those as large that have to be gathered, with the reason.

    Args:
        world: ranks; one has all rows, and nothing is chosen.
    """
    if above is None or world == 1:
        return [], {}
    tables, gathered = find_tables(model)
    return (
        [name for name in tables if model.get_parameter(name).numel() > above],
        {name: reason for name, reason in gathered.items() if model.get_parameter(name).numel() > above},
    )


def divide(
    model: nn.Module,
    names: Sequence[str],
    state: ParallelState,
    *,
    param_dtype: torch.dtype | None,
    in_fp32: Collection[str] = (),
) -> list[ShardedTable]:
    """Shards the rows of these tables over all ranks, as DTensors on FSDP's mesh; returns the modules.

    Args:
        names: paths of weights, as of `choose`.
        param_dtype: in which layers compute; None: as stored.
        in_fp32: names of those that are computed in fp32 all the same.
    """
    mesh = state.fsdp_mesh
    group = dist.group.WORLD if mesh.ndim > 1 else mesh.get_group()
    assert group is not None, "a mesh has running ranks"
    modules = []
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(module, nn.Embedding), "a table of the plan"
        full = module.weight
        sharded = distribute_tensor(full.data, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(sharded, requires_grad=full.requires_grad))
        dtype = torch.float32 if name in in_fp32 else param_dtype or full.dtype
        module.__class__ = _sharded_class(type(module))
        assert isinstance(module, ShardedTable), "the class that was just set"
        module.sharded_rows = ShardedRows(name, group, _first_rows(full.shape[0], mesh.shape), dtype)
        modules.append(module)
    return modules


def of_model(model: nn.Module) -> dict[str, ShardedTable]:
    """The row-sharded tables of a model by the path of their weight."""
    return {
        f"{path}.weight" if path else "weight": module
        for path, module in model.named_modules()
        if isinstance(module, ShardedTable)
    }


def _sharded_class(cls: type[nn.Embedding]) -> type[nn.Embedding]:
    """A class of the same name whose `nn.Embedding.forward` is that of `ShardedTable`."""
    members: dict[str, object] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    if cls is not nn.Embedding:
        members["forward"] = _with_stand_in(cls.forward)
    bases = (ShardedTable,) if cls is nn.Embedding else (cls, ShardedTable)
    return type(cls.__name__, bases, members)


def _with_stand_in(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a class, for which the weight looks as if it was gathered: whole, in the dtype of computing.

    A class that scales its rows reads `self.weight.dtype` for example. The values are NaN: nothing may be computed with them.
    """

    @uncompiled
    def forward_with_stand_in(self: ShardedTable, *args: object, **kwargs: object) -> Tensor:
        weight = vars(self)[_STORED] = self.weight
        device = weight.device_mesh.device_type if isinstance(weight, DTensor) else weight.device
        stand_in = torch.full((), torch.nan, dtype=self.sharded_rows.dtype, device=device)
        self._parameters["weight"] = stand_in.expand(weight.shape)  # pyright: ignore[reportArgumentType]
        try:
            return forward(self, *args, **kwargs)
        finally:
            self._parameters["weight"] = weight
            del vars(self)[_STORED]

    return forward_with_stand_in


def _first_rows(num_rows: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The first row of each rank and the number of rows, as DTensor cuts: over one mesh dimension after the other, each like
    torch.chunk."""
    pieces = [(0, num_rows)]
    for size in sizes:
        cut = []
        for start, stop in pieces:
            chunk = -(-(stop - start) // size)
            bounds = [min(start + index * chunk, stop) for index in range(size + 1)]
            cut += list(itertools.pairwise(bounds))
        pieces = cut
    return (*(start for start, _ in pieces), num_rows)


# ---------------------------------------------------------------------------------------------- looking up


@uncompiled  # a graph break: the host reads the sizes
def look_up(table: ShardedTable, ids: Tensor) -> Tensor:
    """`[..., W]`: the rows of ids `[...]`. One host sync for the different ids and one for the sizes of the exchange."""
    rows = table.sharded_rows
    route = checkpointing.remember(lambda: _route(rows, ids.reshape(-1)))
    weight = vars(table).get(_STORED, table.weight)
    owned_QW = _OwnRows.apply(weight, route, _padding_row(table), rows.dtype)
    rows_UW = all_to_all(
        owned_QW,
        rows.group,
        operation=f"return rows of {rows.name}",
        receive_sizes=route.send_sizes,
        send_sizes=route.receive_sizes,
    )
    # Its backward sums the gradients of equal ids, in a fixed order.
    return F.embedding(route.place_T.view(ids.shape), rows_UW)


@torch.no_grad()
def _route(rows: ShardedRows, ids_T: Tensor) -> _Route:
    ids_U, place_T = torch.unique(ids_T, return_inverse=True)
    first_rows = torch.tensor(rows.first_rows, device=ids_T.device, dtype=ids_U.dtype)
    send_n = torch.searchsorted(ids_U, first_rows).diff()
    # -1 tells all ranks of an id that is no row here: none waits for rows that do not come.
    send_n = send_n.where(send_n.sum() == ids_U.numel(), -1)
    receive_n = all_to_all(send_n, rows.group, operation=f"exchange how many rows of {rows.name} are wanted")
    with watch.operation(f"wait for how many rows of {rows.name} are wanted"):
        send_sizes, receive_sizes = torch.stack([send_n, receive_n]).tolist()
    _require_rows(rows, ids_U, send_sizes, receive_sizes)
    wanted_Q = all_to_all(
        ids_U,
        rows.group,
        operation=f"send ids to rows of {rows.name}",
        receive_sizes=receive_sizes,
        send_sizes=send_sizes,
    )
    return _Route(place_T, wanted_Q - first_rows[dist.get_rank(rows.group)], send_sizes, receive_sizes)


def _require_rows(rows: ShardedRows, ids_U: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> None:
    """Raises IndexError on all ranks if one of them looked up an id that is no row: each of these marked its sizes."""
    num_rows = rows.first_rows[-1]
    if -1 in send_sizes:
        raise IndexError(
            f"Ids {int(ids_U[0])} to {int(ids_U[-1])} were looked up in {rows.name}, which has {num_rows} rows."
        )
    if wrong := [rank for rank, size in enumerate(receive_sizes) if size == -1]:
        others = ", ".join(str(dist.get_global_rank(rows.group, rank)) for rank in wrong)
        raise IndexError(f"An id that is none of the {num_rows} rows of {rows.name} was looked up on rank {others}.")


def _padding_row(table: ShardedTable) -> int | None:
    """The row of `padding_idx`, which gets no gradient, counted from this rank's first; None: without one."""
    if table.padding_idx is None:
        return None
    rows = table.sharded_rows
    return table.padding_idx - rows.first_rows[dist.get_rank(rows.group)]


class _OwnRows(torch.autograd.Function):
    """This rank's rows that ranks want; the backward adds their gradients to `weight.grad` itself, which returned to autograd
    would be a whole shard for every look-up."""

    @staticmethod
    def forward(ctx, weight, route, padding_row, dtype):
        ctx.weight, ctx.route, ctx.padding_row = weight, route, padding_row
        shard = undivided.local(weight)
        wanted_Q = route.wanted_Q.to(shard.device)  # shards may be in host memory
        return shard.index_select(0, wanted_Q).to(device=route.wanted_Q.device, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_QW):
        route = ctx.route
        if ctx.padding_row is not None:
            gradient_QW = gradient_QW.masked_fill((route.wanted_Q == ctx.padding_row)[:, None], 0)
        _add_to_gradient(ctx.weight, route, gradient_QW)
        return None, None, None, None


def _add_to_gradient(weight: nn.Parameter, route: _Route, rows_QW: Tensor) -> None:
    """Adds the rows of each rank, among which none is twice, to the gradient: no atomic addition meets another."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    gradient = undivided.local(weight.grad)
    wanted_Q, rows_QW = route.wanted_Q.to(gradient.device), rows_QW.to(gradient.device)
    total, places_Q = gradient, wanted_Q
    wide = torch.promote_types(gradient.dtype, torch.float32)
    if wide != gradient.dtype:  # sums are rounded once
        touched_V, places_Q = torch.unique(wanted_Q, return_inverse=True)
        total = gradient.index_select(0, touched_V).to(wide)
    pieces = zip(places_Q.split(route.receive_sizes), rows_QW.split(route.receive_sizes), strict=True)
    for places, rows in pieces:
        total.index_add_(0, places, rows.to(wide))
    if wide != gradient.dtype:
        gradient.index_copy_(0, touched_V, total.to(gradient.dtype))
