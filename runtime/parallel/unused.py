"""Parameters that nothing computed with on this rank: zeros in the sum over the ranks, no update where no rank used them.

FSDP2 sends the gradients of a unit that there are, one after the other. A row shorter than a window leaves some out, and ranks
would add up different parameters, or wait for bytes that do not come. So what a unit lacks when its backward ends is zeros:

    rank 0   a long row     q_proj   position_bias
    rank 1   a short row    q_proj   0

On one rank a parameter that nothing used has no gradient, and optimizers pass over it: it does not decay and its moments stay.
`agree` makes that so on several: zeros of all ranks are no gradient.

A whole unit that runs on some ranks only cannot be filled up: the others would receive another unit's parameters in its place.
`agree` compares what the ranks gathered, and in which order, and says where they part. Where ranks wait for each other
before a step ends, `watch.py` says so.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from patchgen.runtime.parallel import undivided
from patchgen.runtime.parallel.collectives import all_reduce

LEFT_OUT = "_patchgen_left_out"  # of a parameter: whether its gradient is zeros in place of none, in this step
_STOOD_IN = (
    "_patchgen_stood_in"  # of a parameter, or of what FSDP2 gathers of it: a tower without an input ran through it
)
_UNUSED, _ZEROS, _USED = range(3)
_ORDER = "_patchgen_order_of_units"  # of a sharded model
_KEPT = 10_000  # units of a step that are remembered by name


class Order:
    """Which units a rank gathered and summed in this step, one after the other."""

    def __init__(self) -> None:
        self.digest = 0
        self.names: deque[str] = deque(maxlen=_KEPT)

    def note(self, number: int, what: str, name: str) -> None:
        self.digest = hash((self.digest, number, len(what))) % 2**62  # of numbers alone: the same on every rank
        self.names.append(f"{what} {name}")


class FilledGroup(FSDPParamGroup):
    """The parameters of one unit, all of which take part in its sum over the ranks."""

    order: Order
    number: int
    """Among all units."""
    _runs = 0  # forwards whose backward has not ended
    _took_part = False
    has_accumulated = False
    """Whether a micro-batch before ran this unit and its gradients were not summed: the same on ranks that lack some."""
    _left_early: Collection[FSDPParam] = ()

    def unshard(self, async_op: bool = False) -> None:
        before = self._all_gather_result
        super().unshard(async_op)
        # Without gradients a replica may run as often as it likes: nothing of it is summed.
        counts = torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
        if counts and self._all_gather_result is not None and self._all_gather_result is not before:
            self.order.note(self.number, "gather", self._module_fqn or "the root")

    def pre_backward(self, *arguments: Any) -> None:
        self._took_part = True
        super().pre_backward(*arguments)

    def _register_post_backward_hook(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        found = super()._register_post_backward_hook(args, kwargs)
        is_replay = torch._C._current_graph_task_id() != -1  # of a layer, in the backward: nothing follows
        self._runs += not is_replay and (found[0] is not args or found[1] is not kwargs)
        return found

    def post_backward(self, *unused: object) -> None:
        if self.reduce_grads and not self.ends():
            # A parameter that only some runs use would be summed earlier on some ranks than on others.
            self.reduce_grads = False
            super().post_backward(*unused)
            self.reduce_grads = self.has_accumulated = True
            return
        if self.reduce_grads:
            self.fill_up()
            self.has_accumulated = False
        else:
            self.has_accumulated |= self._took_part
        super().post_backward(*unused)

    def ends(self) -> bool:
        """To be called once when the backward of a run ends: whether it was the last run."""
        self._runs -= 1
        return self._runs <= 0

    @torch.no_grad()
    def fill_up(self) -> None:
        """Gives zeros to what has no gradient and can get none any more."""
        if not self._took_part:
            return
        self.order.note(self.number, "sum", self._module_fqn or "the root")
        # What several micro-batches added up has the dtype of the sum, and so have all of a unit.
        widens = self.has_accumulated
        for param in self.fsdp_params:
            computed = param._unsharded_param
            if vars(computed).pop(_STOOD_IN, False):
                setattr(param.sharded_param, _STOOD_IN, True)
            if computed.grad is not None or param.unsharded_accumulated_grad is not None or param in self._left_early:
                setattr(param.sharded_param, LEFT_OUT, False)
            elif computed.requires_grad:
                setattr(param.sharded_param, LEFT_OUT, getattr(param.sharded_param, LEFT_OUT, True))
                computed.grad = torch.zeros_like(computed)
            if widens and param.unsharded_accumulated_grad is None:
                param.to_accumulated_grad_if_needed()

    def finalize_backward(self) -> None:
        if self._took_part and self.reduce_grads and self._runs > 0:  # of a run that no gradient went through
            self._runs = 0
            self.post_backward()
            self._training_state = TrainingState.IDLE
        super().finalize_backward()
        self._runs, self._took_part = 0, False


def install(model: nn.Module) -> None:
    """Lets units of a sharded model whose gradients are summed over ranks fill them up; after `peer_units.install`."""
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in undivided.param_groups(module)
    ]
    order = Order()
    for number, group in enumerate(groups):
        if type(group) is FSDPParamGroup and group.mesh_info.mesh.size() > 1:
            group.__class__ = FilledGroup
        if isinstance(group, FilledGroup):
            group.order, group.number = order, number
    setattr(model, _ORDER, order)


def gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter that every rank holds whole; zeros become it where this rank has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
        setattr(parameter, LEFT_OUT, True)
    return parameter.grad


def agree(model: nn.Module) -> None:
    """Takes away gradients that no rank computed, before an optimizer's step. Every rank must call it.

    Raises:
        RuntimeError: on all ranks, if they gathered or summed different units in this step.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    order = getattr(model, _ORDER, None) or Order()
    # Over the host where the process group reaches it: then nothing waits for a device.
    device = "cpu" if "cpu" in dist.get_backend_config() else "cuda"
    mine = torch.tensor([order.digest, -order.digest, *map(_use, trained)], device=device)
    operation = "agree on which parameters were used"
    most, least, *uses = all_reduce(mine, op=dist.ReduceOp.MAX, operation=operation).tolist()
    if most != -least:
        _refuse_to_part(order)
    order.digest = 0
    order.names.clear()
    unused = [parameter for parameter, use in zip(trained, uses, strict=True) if use == _UNUSED]
    zeros = [parameter for parameter, use in zip(trained, uses, strict=True) if use == _ZEROS]
    for parameter in unused + _without_gradient(zeros):
        parameter.grad = None


def _use(parameter: nn.Parameter) -> int:
    """What this rank knows of this step's use of a parameter; the next step is asked anew."""
    left_out, stood_in = (vars(parameter).pop(name, False) for name in (LEFT_OUT, _STOOD_IN))
    return _UNUSED if left_out else _ZEROS if stood_in else _USED


def _without_gradient(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Those whose gradient is zero on all ranks: towers that no rank had an input for. Others were used otherwise, too."""
    if not parameters:
        return []
    gradients = [undivided.local(p.grad) if p.grad is not None else None for p in parameters]
    device = next((one.device for one in gradients if one is not None), torch.device("cpu"))
    found = [one.count_nonzero() if one is not None else torch.zeros((), dtype=torch.long) for one in gradients]
    counts = all_reduce(torch.stack([one.to(device) for one in found]), operation="look for gradients of towers")
    return [parameter for parameter, count in zip(parameters, counts.tolist(), strict=True) if not count]


def stands_in(value: Tensor) -> None:
    """Notes the parameters that a value was computed from, which takes the place of what this rank does not have."""
    pending, seen = [value.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            setattr(variable, _STOOD_IN, True)
        pending += [following for following, _ in node.next_functions]


def _refuse_to_part(order: Order) -> NoReturn:
    """Every rank must call it."""
    names: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names, list(order.names))
    columns = enumerate(itertools.zip_longest(*names, fillvalue="nothing more"))
    forgotten = -1, [f"one before the last {_KEPT}"] * len(names)
    place, told = next(((place, told) for place, told in columns if len(set(told)) > 1), forgotten)
    what = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(told))
    raise RuntimeError(
        f"The ranks ran different modules in this step, and each was given what another sent for another module. The first "
        f"difference, number {place + 1} of the step: {what}. A branch of the model depends on the data or the random numbers "
        "of one rank (layers dropped at random, a module for some tokens only). To fix: let every rank run every module, or "
        "train on one rank."
    )
