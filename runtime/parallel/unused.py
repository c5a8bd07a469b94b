"""Parameters unused on this rank: zeros in the sum over the ranks, and no update if no rank used them.

FSDP2 reduces the existing gradients of a unit, concatenated. If a rank lacks some, e.g. for a row shorter than a window, ranks
would sum different parameters, or wait for bytes that never come. So missing gradients become zeros when a backward ends:

    rank 0   a long row     q_proj   position_bias
    rank 1   a short row    q_proj   0

On one rank an unused parameter has no gradient, and optimizers skip it: no weight decay, and its moments stay.
`drop_unused_gradients` does the same on several ranks: zeros on all ranks become no gradient.

A unit that runs on some ranks only cannot be zero-filled: the others would receive another unit's parameters.
`drop_unused_gradients` compares what the ranks gathered, in order, and reports the first difference. If ranks hang before
the step ends, `watch.py` reports it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from patchgen.runtime.parallel import undivided
from patchgen.runtime.parallel.collectives import all_reduce, gather_objects

LEFT_OUT = "_patchgen_left_out"  # on a parameter: whether its gradient in this step is zeros instead of none
_STAND_IN = "_patchgen_stand_in"  # on a parameter, sharded or not: used by a tower without a real input
_UNUSED, _ZEROS, _USED = range(3)
_ORDERS = "_patchgen_orders_of_units"  # on a sharded model: of gathers and sums of units, and of sums in peer memory
_MAX_NAMES = 10_000  # of the units of a step; the last ones are kept
_BRANCH_CAUSE = (
    "A branch of the model depends on the data or the random numbers of one rank (layers dropped at random, a module for some "
    "tokens only). To fix: let every rank run every module, or train on one rank."
)
_MISSING_GRADIENT_CAUSE = (
    "A rank computes no gradient for a large parameter that others sum while their backward still runs. To fix: let every rank "
    "compute it, or sum by collectives (parallel.shard_exchange: collectives)."
)


class UnitOrder:
    """What a rank gathered and reduced in this step, in order.

    Args:
        cause: why the order may differ between ranks, and what to do.
    """

    def __init__(self, cause: str = _BRANCH_CAUSE) -> None:
        self.cause = cause
        self.digest = 0
        self.names: deque[str] = deque(maxlen=_MAX_NAMES)

    def note(self, number: int, operation: str, name: str) -> None:
        self.digest = hash((self.digest, number, len(operation))) % 2**62  # of integers only: the same on every rank
        self.names.append(f"{operation} {name}")

    def clear(self) -> None:
        self.digest = 0
        self.names.clear()


class ZeroFillingGroup(FSDPParamGroup):
    """The parameter group of one unit, all of which takes part in its reduction."""

    order: UnitOrder
    peer_sums: UnitOrder
    """Apart from `order`: ranks that lack a large gradient sum it when the unit's backward ends, the others earlier."""
    number: int
    """The index among all units."""
    _runs = 0  # forwards whose backward has not ended
    _took_part = False
    has_accumulated = False
    """Whether an earlier micro-batch ran this unit without reduction; the same on ranks that lack some gradients."""
    _reduced_early: Collection[FSDPParam] = ()

    def unshard(self, async_op: bool = False) -> None:
        before = self._all_gather_result
        super().unshard(async_op)
        # Without gradients ranks may run a unit any number of times: nothing is reduced.
        counts = torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
        if counts and self._all_gather_result is not None and self._all_gather_result is not before:
            self.order.note(self.number, "gather", self._module_fqn or "the root")

    def pre_backward(self, *arguments: Any) -> None:
        self._took_part = True
        super().pre_backward(*arguments)

    def _register_post_backward_hook(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        hooked = super()._register_post_backward_hook(args, kwargs)
        is_replay = torch._C._current_graph_task_id() != -1  # a recomputation has no backward of its own
        self._runs += not is_replay and (hooked[0] is not args or hooked[1] is not kwargs)
        return hooked

    def post_backward(self, *unused: object) -> None:
        if self.reduce_grads and not self.end_run():
            # A parameter used by some runs only would be reduced earlier on some ranks than on others.
            self.reduce_grads = False
            super().post_backward(*unused)
            self.reduce_grads = self.has_accumulated = True
            return
        if self.reduce_grads:
            self.fill_missing_gradients()
            self.has_accumulated = False
        else:
            self.has_accumulated |= self._took_part
        super().post_backward(*unused)

    def end_run(self) -> bool:
        """Counts the end of a run's backward; returns whether it was the last run."""
        self._runs -= 1
        return self._runs <= 0

    @torch.no_grad()
    def fill_missing_gradients(self) -> None:
        """Sets missing gradients to zeros, at the end of the backward."""
        if not self._took_part:
            return
        self.order.note(self.number, "sum", self._module_fqn or "the root")
        # Accumulated gradients have the dtype of the sum, which must be the same for the whole unit.
        widens = self.has_accumulated
        for param in self.fsdp_params:
            computed = param._unsharded_param
            if vars(computed).pop(_STAND_IN, False):
                setattr(param.sharded_param, _STAND_IN, True)
            if (
                computed.grad is not None
                or param.unsharded_accumulated_grad is not None
                or param in self._reduced_early
            ):
                setattr(param.sharded_param, LEFT_OUT, False)
            elif computed.requires_grad:
                setattr(param.sharded_param, LEFT_OUT, getattr(param.sharded_param, LEFT_OUT, True))
                computed.grad = torch.zeros_like(computed)
            if widens and param.unsharded_accumulated_grad is None:
                param.to_accumulated_grad_if_needed()

    def finalize_backward(self) -> None:
        if self._took_part and self.reduce_grads and self._runs > 0:  # a run without any gradient
            self._runs = 0
            self.post_backward()
            self._training_state = TrainingState.IDLE
        super().finalize_backward()
        self._runs, self._took_part = 0, False


def install(model: nn.Module) -> None:
    """Installs `ZeroFillingGroup` in units reduced over several ranks; call it after `peer_units.install`."""
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in undivided.param_groups(module)
    ]
    order, peer_sums = UnitOrder(), UnitOrder(_MISSING_GRADIENT_CAUSE)
    for number, group in enumerate(groups):
        if type(group) is FSDPParamGroup and group.mesh_info.mesh.size() > 1:
            group.__class__ = ZeroFillingGroup
        if isinstance(group, ZeroFillingGroup):
            group.order, group.peer_sums, group.number = order, peer_sums, number
    setattr(model, _ORDERS, (order, peer_sums))


def gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """The gradient of a replicated parameter, set to zeros if this rank has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
        setattr(parameter, LEFT_OUT, True)
    return parameter.grad


def drop_unused_gradients(model: nn.Module) -> None:
    """Removes gradients that no rank computed, before an optimizer's step. Every rank must call it.

    Raises:
        RuntimeError: on all ranks, if they gathered or reduced different units in this step.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    orders: Sequence[UnitOrder] = getattr(model, _ORDERS, ())
    # On the host if the process group supports it: then nothing waits for a device.
    device = "cpu" if "cpu" in dist.get_backend_config() else "cuda"
    digests = [sign * order.digest for order in orders for sign in (1, -1)]
    local = torch.tensor([*digests, *map(_use, trained)], device=device)
    operation = "agree on which parameters were used"
    agreed = all_reduce(local, op=dist.ReduceOp.MAX, operation=operation).tolist()
    for place, order in enumerate(orders):
        if agreed[2 * place] != -agreed[2 * place + 1]:
            _raise_order_mismatch(order)
    for order in orders:
        order.clear()
    uses = agreed[len(digests) :]
    without_gradient = [parameter for parameter, use in zip(trained, uses, strict=True) if use == _UNUSED]
    zeros = [parameter for parameter, use in zip(trained, uses, strict=True) if use == _ZEROS]
    for parameter in without_gradient + _zero_on_all_ranks(zeros):
        parameter.grad = None


def _use(parameter: nn.Parameter) -> int:
    """This rank's use of a parameter in this step; resets the marks."""
    left_out, stood_in = (vars(parameter).pop(name, False) for name in (LEFT_OUT, _STAND_IN))
    return _UNUSED if left_out else _ZEROS if stood_in else _USED


def _zero_on_all_ranks(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters whose gradient is zero on all ranks: those of towers that no rank had an input for."""
    if not parameters:
        return []
    gradients = [undivided.local(p.grad) if p.grad is not None else None for p in parameters]
    device = next((gradient.device for gradient in gradients if gradient is not None), torch.device("cpu"))
    local = [g.count_nonzero() if g is not None else torch.zeros((), dtype=torch.long) for g in gradients]
    counts = all_reduce(torch.stack([count.to(device) for count in local]), operation="count gradients of towers")
    return [parameter for parameter, count in zip(parameters, counts.tolist(), strict=True) if not count]


def mark_stand_in(value: Tensor) -> None:
    """Marks the parameters that a stand-in for a missing input was computed from."""
    for node in graph_nodes(value):
        if (variable := getattr(node, "variable", None)) is not None:
            setattr(variable, _STAND_IN, True)


def graph_nodes(value: Tensor) -> Iterator[Node]:
    """The nodes of the graph that computed `value`, each once."""
    pending, visited = [value.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            pending += [following for following, _ in node.next_functions]
            yield node


def _raise_order_mismatch(order: UnitOrder) -> NoReturn:
    """Raises on all ranks, naming the first difference; every rank must call it."""
    names = gather_objects(list(order.names))
    columns = enumerate(itertools.zip_longest(*names, fillvalue="nothing more"))
    forgotten = -1, (f"one before the last {_MAX_NAMES}",) * len(names)
    index, differing = next(((index, column) for index, column in columns if len(set(column)) > 1), forgotten)
    units = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(differing))
    raise RuntimeError(
        f"The ranks ran different modules in this step, so they exchanged data of different modules. The first difference, "
        f"number {index + 1} of the step: {units}. {order.cause}"
    )
