"""Collectives with a backward: what sequence and expert parallelism exchange. Nothing here knows a model.

Each call names itself to `watch.py`, so that one that stalls can be reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from patchgen.runtime.parallel import watch


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single` over the first dimension; its backward is the same exchange the other way round."""

    @staticmethod
    def forward(ctx, rows, receive_sizes, send_sizes, group, operation):
        ctx.sizes, ctx.group, ctx.operation = (receive_sizes, send_sizes), group, operation
        return _exchange(rows, receive_sizes, send_sizes, group, operation)

    @staticmethod
    def backward(ctx, gradient):
        receive_sizes, send_sizes = ctx.sizes
        returned = _exchange(gradient, send_sizes, receive_sizes, ctx.group, f"{ctx.operation}, backward")
        return returned, None, None, None, None


def _exchange(rows, receive_sizes, send_sizes, group, operation):
    with watch.operation(operation):
        received = functional.all_to_all_single(rows.contiguous(), receive_sizes, send_sizes, group)
        return functional.wait_tensor(received)


@torch.compiler.disable  # a compiled layer stops here: progress is noted on the host, and sizes may come from there
def all_to_all(
    rows: Tensor,
    group: dist.ProcessGroup,
    *,
    operation: str,
    receive_sizes: Sequence[int] | None = None,
    send_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sends consecutive blocks of the first dimension to the ranks of `group`, in rank order.

    Args:
        rows: `[R, ...]`.
        operation: what this exchange is, for reports of stalls.
        receive_sizes, send_sizes: rows per rank; None on both: equal blocks.

    Returns:
        `[sum(receive_sizes), ...]`; differentiable.
    """
    receive = list(receive_sizes) if receive_sizes is not None else None
    send = list(send_sizes) if send_sizes is not None else None
    return _AllToAll.apply(rows, receive, send, group, operation)


def all_gather(tensor: Tensor, group: dist.ProcessGroup, dim: int, *, operation: str) -> Tensor:
    """The tensors of all ranks of `group`, concatenated along `dim` in rank order; not differentiable."""
    parts = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
    ]
    with watch.operation(operation):
        dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.cat(parts, dim=dim)


# Renamed in torch 2.13; the old names warn.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _GatherRows(torch.autograd.Function):
    """All-gather along the first dimension; its backward adds up the gradients of all ranks and hands out the slices."""

    @staticmethod
    def forward(ctx, rows, group, operation):
        ctx.group, ctx.operation = group, operation
        with watch.operation(operation):
            whole = rows.new_empty((rows.shape[0] * dist.get_world_size(group), *rows.shape[1:]))
            _ALL_GATHER(whole, rows.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        with watch.operation(f"{ctx.operation}, backward"):
            own = gradient.new_empty((gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:]))
            _REDUCE_SCATTER(own, gradient.contiguous(), group=ctx.group)
        return own, None, None


@torch.compiler.disable
def gather_rows(rows: Tensor, group: dist.ProcessGroup, *, operation: str) -> Tensor:
    """`[R, ...]` of each rank, the same R, to `[R * ranks, ...]` in rank order; differentiable."""
    return _GatherRows.apply(rows, group, operation)


def all_reduce(
    tensor: Tensor, *, operation: str, group: dist.ProcessGroup | None = None, op=dist.ReduceOp.SUM
) -> Tensor:
    """The sum (or `op`) over the ranks of `group`, all ranks by default, as a new tensor; not differentiable."""
    reduced = tensor.detach().clone()
    with watch.operation(operation):
        dist.all_reduce(reduced, op=op, group=group)
    return reduced
