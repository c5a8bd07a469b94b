"""Collectives with a backward: what sequence and expert parallelism exchange. Nothing here knows a model.

Each call names itself to `watch.py`, so that one that stalls can be reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from patchgen.runtime.parallel import watch
from patchgen.runtime.uncompiled import uncompiled

Value = TypeVar("Value")


@dataclass
class _Exchange:
    """How the rows of one exchange are divided, what it is called, and the gradient that is on its way."""

    receive: list[int] | None
    send: list[int] | None
    group: dist.ProcessGroup
    operation: str
    returning: Tensor | None = None

    def launch(self, rows: Tensor, *, reverse: bool = False) -> Tensor:
        """Starts the exchange; what it returns holds nothing until `wait` was called on it."""
        count = dist.get_world_size(self.group)
        receive = self.receive or [rows.shape[0] // count] * count
        send = self.send or [rows.shape[0] // count] * count
        if reverse:
            receive, send = send, receive
        with watch.operation(f"{self.operation}, backward" if reverse else self.operation):
            return torch.ops._c10d_functional.all_to_all_single(
                rows.contiguous(), receive, send, self.group.group_name
            )

    def wait(self, rows: Tensor, *, reverse: bool = False) -> Tensor:
        with watch.operation(f"{self.operation}, backward" if reverse else self.operation):
            return torch.ops._c10d_functional.wait_tensor(rows)


# One exchange is two nodes of the graph, so that what is computed between them overlaps with it in both directions:
#
#     forward   Launch starts it    ... other work ...   Wait waits for it
#     backward  Launch waits        ... its backward ... Wait starts the exchange of the gradient
#
# The gradient on its way has other rows than what Wait received, which autograd would not let pass between the two: it
# travels in the exchange, and what passes is a stand-in that nothing reads.
class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        return exchange.launch(rows)

    @staticmethod
    def backward(ctx, _stand_in):
        returned, ctx.exchange.returning = ctx.exchange.returning, None
        return ctx.exchange.wait(returned, reverse=True), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        return exchange.wait(rows)

    @staticmethod
    def backward(ctx, gradient):
        ctx.exchange.returning = ctx.exchange.launch(gradient, reverse=True)
        return gradient, None


@uncompiled  # a compiled layer stops here: progress is noted on the host, and sizes may come from there
def start_all_to_all(
    rows: Tensor,
    group: dist.ProcessGroup,
    *,
    operation: str,
    receive_sizes: Sequence[int] | None = None,
    send_sizes: Sequence[int] | None = None,
) -> Callable[[], Tensor]:
    """Starts to send consecutive blocks of the first dimension to the ranks of `group`, in rank order.

    Args:
        rows: `[R, ...]`.
        operation: what this exchange is, for reports of stalls.
        receive_sizes, send_sizes: rows per rank; None on both: equal blocks.

    Returns:
        A function to be called once: it waits and returns `[sum(receive_sizes), ...]`, differentiable. What is
        computed before that call overlaps with the exchange, and so does its backward.
    """
    receive = list(receive_sizes) if receive_sizes is not None else None
    send = list(send_sizes) if send_sizes is not None else None
    exchange = _Exchange(receive, send, group, operation)
    received = _Launch.apply(rows, exchange)
    return lambda: _Wait.apply(received, exchange)


@uncompiled
def all_to_all(rows: Tensor, group: dist.ProcessGroup, **options) -> Tensor:
    """`start_all_to_all` with the same arguments, waited for at once."""
    return start_all_to_all(rows, group, **options)()


def gather_objects(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """What every rank of `group`, all by default, has; without torch.distributed what this one has."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def object_of(value: Value, rank: int = 0, group: dist.ProcessGroup | None = None) -> Value:
    """What one rank has, on all of them: what it sees on a disk, or decided, counts for all."""
    shared = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=rank, group=group)
    return shared[0]


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


@uncompiled
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
