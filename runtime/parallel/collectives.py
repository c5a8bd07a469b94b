"""Differentiable collectives of sequence and expert parallelism, independent of any model.

Each call registers a description with `watch.py`, which reports calls that stall.
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
    """The split sizes of one all-to-all, its description, and the gradient in flight."""

    receive: list[int] | None
    send: list[int] | None
    group: dist.ProcessGroup
    operation: str
    gradient_in_flight: Tensor | None = None

    def launch(self, rows: Tensor, *, reverse: bool = False) -> Tensor:
        """Starts the exchange; the result may be read only after `wait`."""
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
# The gradient in flight has another number of rows than Wait's output, so autograd cannot pass it between the two nodes:
# `_Exchange` stores it, and autograd passes a placeholder that is never read.
class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        return exchange.launch(rows)

    @staticmethod
    def backward(ctx, _placeholder):
        gradient, ctx.exchange.gradient_in_flight = ctx.exchange.gradient_in_flight, None
        return ctx.exchange.wait(gradient, reverse=True), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        return exchange.wait(rows)

    @staticmethod
    def backward(ctx, gradient):
        ctx.exchange.gradient_in_flight = ctx.exchange.launch(gradient, reverse=True)
        return gradient, None


@uncompiled  # a graph break: progress is tracked on the host, and sizes may come from it
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
        operation: a description of this exchange, for reports of stalls.
        receive_sizes, send_sizes: rows per rank; None on both: equal blocks.

    Returns:
        A function to be called once, which waits and returns `[sum(receive_sizes), ...]`, differentiable. Computation
        before that call overlaps with the exchange, and so does its backward.
    """
    receive = list(receive_sizes) if receive_sizes is not None else None
    send = list(send_sizes) if send_sizes is not None else None
    exchange = _Exchange(receive, send, group, operation)
    pending = _Launch.apply(rows, exchange)
    return lambda: _Wait.apply(pending, exchange)


@uncompiled
def all_to_all(rows: Tensor, group: dist.ProcessGroup, **options) -> Tensor:
    """`start_all_to_all`, then waits for it."""
    return start_all_to_all(rows, group, **options)()


def gather_objects(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """The values of all ranks of `group` (default: all ranks), in rank order; `[value]` without torch.distributed."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Value, rank: int = 0, group: dist.ProcessGroup | None = None) -> Value:
    """The value of the rank with the global number `rank`, on all ranks of `group`."""
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
    """All-gather along the first dimension; its backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx, rows, group, operation):
        ctx.group, ctx.operation = group, operation
        with watch.operation(operation):
            gathered = rows.new_empty((rows.shape[0] * dist.get_world_size(group), *rows.shape[1:]))
            _ALL_GATHER(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, gradient):
        with watch.operation(f"{ctx.operation}, backward"):
            shard = gradient.new_empty((gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:]))
            _REDUCE_SCATTER(shard, gradient.contiguous(), group=ctx.group)
        return shard, None, None


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
