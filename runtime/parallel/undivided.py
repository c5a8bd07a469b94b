"""Units of FSDP2 whose parameters one rank holds alone: nothing is gathered or reduced, so nothing is copied.

On a mesh of one rank FSDP2 still moves everything as if it came from others. Bytes per parameter of a step, fp32 parameters
computed with in bf16:

    FSDP2     cast, then copied, before the forward and again before the backward                         20
              gradient widened, divided by one, copied                                                    22
    here      cast into a copy that stays, before the forward                                              6
              or written by the optimizer in passing (`train/adamw.py`)                                     2
              gradient handed over as it is, where the optimizer takes it so (`grad_dtype` None)            0

That is one GPU without sharding, and the experts wherever each lies on one rank (`ep_shard` 1). The numbers are FSDP2's: the
same cast, and gradients of several micro-batches are added up in the dtype of the parameter.

A copy that an optimizer wrote is used in training until another optimizer takes a step or the parameter is changed otherwise.
Changes are seen by the versions that autograd counts, which `parameter.data` and `torch._foreach_...` of DTensors leave as
they are: after such a change outside an optimizer, `forget_copies(model)`. In evaluation every forward casts.
"""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from patchgen.kernels.moe import early_gradients

COPY = "_patchgen_compute_copy"  # an attribute of a parameter: its ComputeCopy


class _Steps:
    """Those of optimizers that write no copies: torch's change DTensors without counting versions."""

    of_others = 0


def _count_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    _Steps.of_others += not getattr(optimizer, "writes_copies", False)


register_optimizer_step_post_hook(_count_step)


@dataclass
class ComputeCopy:
    """What a layer computes with in place of a parameter.

    Attributes:
        tensor: flat, in the dtype of computing.
        written: what the parameter was when an optimizer wrote the tensor; None: nothing is known.
    """

    tensor: Tensor
    written: tuple[int, ...] | None = None

    def is_current(self, parameter: nn.Parameter) -> bool:
        return self.written == _identity(parameter)

    def before_writing(self) -> None:
        """To be called before the tensor is written."""

    def written_from(self, parameter: nn.Parameter) -> None:
        """Says that the tensor holds the parameter as it is now."""
        self.written = _identity(parameter)


def _identity(parameter: nn.Parameter) -> tuple[int, ...]:
    own = local(parameter)
    return id(own), own.data_ptr(), own._version, parameter._version, _Steps.of_others


def copy_of(parameter: nn.Parameter) -> ComputeCopy | None:
    """The copy of a parameter, for an optimizer that writes it in passing; None: there is none to write."""
    return getattr(parameter, COPY, None)


def forget_copies(model: nn.Module) -> None:
    """Lets the next forward cast all parameters, however they were changed."""
    for parameter in model.parameters():
        if (copy := copy_of(parameter)) is not None:
            copy.written = None


def install(model: nn.Module) -> int:
    """Lets the undivided units of a sharded model keep their copies; returns how many there are."""
    count = 0
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                if type(group) is FSDPParamGroup and _is_undivided(group):
                    group.__class__ = UndividedGroup
                    count += 1
    return count


def param_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """The groups of parameters of one unit; later releases of torch may have several."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _is_undivided(group: FSDPParamGroup) -> bool:
    mesh = group.mesh_info
    offloads = any(param.offload_to_cpu for param in group.fsdp_params)
    return type(mesh) is FSDPMeshInfo and mesh.shard_mesh_size == 1 and not offloads  # not replicated either


class UndividedGroup(FSDPParamGroup):
    """The parameters of one unit, all of them on this rank."""

    @property
    def keeps_copies(self) -> bool:
        """Whether all of it is trained: a copy of what never changes would only take memory. Decided at the first use."""
        if not hasattr(self, "_keeps_copies"):
            self._keeps_copies = all(param.sharded_param.requires_grad for param in self.fsdp_params)
        return self._keeps_copies

    def unshard(self, async_op: bool = False) -> None:
        if not self.keeps_copies:
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        if not self.keeps_copies:
            super().wait_for_unshard()
        elif not self.is_unsharded:
            is_backward = self._training_state == TrainingState.PRE_BACKWARD  # the forward cast what it needs
            for param in self.fsdp_params:
                _provide(param, may_be_old=is_backward, trusts_optimizer=self.modules[0].training)
            self._to_unsharded()

    def post_backward(self, *unused: object) -> None:
        if not self.keeps_copies:
            super().post_backward(*unused)
            return
        self._training_state = TrainingState.POST_BACKWARD
        self._hand_over_gradients()
        if self.reshard_after_backward:
            self.reshard()

    def finalize_backward(self) -> None:
        if self.keeps_copies:
            early_gradients.compute_late()
            self._hand_over_gradients()  # of what was used again after the unit's own backward
        super().finalize_backward()

    @torch.no_grad()
    def _hand_over_gradients(self) -> None:
        for param in self.fsdp_params:
            _hand_over_gradient(param)


@torch.no_grad()
def _provide(param: FSDPParam, *, may_be_old: bool, trusts_optimizer: bool) -> None:
    """Makes the unsharded parameter of FSDP2 what the sharded one holds now."""
    parameter, source = param.sharded_param, param._sharded_local_tensor
    dtype = param.param_dtype or source.dtype
    if dtype == source.dtype:
        _use(param, source.view(-1))  # itself: there is nothing to cast
        return
    copy = getattr(param, COPY, None)
    if copy is None:
        copy, may_be_old = ComputeCopy(torch.empty(source.numel(), dtype=dtype, device=source.device)), False
        setattr(param, COPY, copy)
    setattr(parameter, COPY, copy)
    if not may_be_old and not (trusts_optimizer and copy.is_current(parameter)):
        copy.written = None
        with torch.autograd._unsafe_preserve_version_counter(copy.tensor):  # pyright: ignore[reportPrivateImportUsage]
            copy.tensor.copy_(source.view(-1))
    _use(param, copy.tensor)


def _use(param: FSDPParam, values: Tensor) -> None:
    """Lets FSDP2's unsharded parameter be these values, flat, which it must never free."""
    if hasattr(param, "_unsharded_param"):
        if local(param._unsharded_param).data_ptr() == values.data_ptr():
            return
        del param._unsharded_param
    param.all_gather_outputs = [values]
    param.init_unsharded_param()
    param.all_gather_outputs = []
    # Weak, for Python frees no cycle through a tensor's attributes.
    setattr(param._unsharded_param, early_gradients.TAKES_LATE, partial(_take_late, weakref.ref(param)))


def _hand_over_gradient(param: FSDPParam) -> None:
    """The gradient of what was computed with becomes that of the parameter, added to one that is there."""
    computed = getattr(param, "_unsharded_param", None)
    if computed is not None and computed.grad is not None:
        new, computed.grad = param._get_grad_inner_tensor(computed.grad), None
        _add_gradient(param, new)


def _take_late(reference: weakref.ref[FSDPParam], gradient: Tensor) -> None:
    """A gradient that was computed when its layer had ended (`kernels/early_gradients.py`)."""
    param = reference()
    if param is None:
        raise RuntimeError("A gradient came late, and its parameter is gone.")
    _add_gradient(param, gradient)


def _add_gradient(param: FSDPParam, new: Tensor) -> None:
    """Adds a gradient, as it was computed, to that of the parameter if it has one."""
    target = param.sharded_param
    if target.grad is None:
        as_computed = target.grad_dtype is None
        target.grad = _laid_out(param, new if as_computed else new.to(target.dtype))
    elif target.grad.dtype == target.dtype:
        local(target.grad).add_(new)
    else:
        target.grad = _laid_out(param, local(target.grad).to(target.dtype).add_(new))
    for hook in (getattr(target, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(target)


def _laid_out(param: FSDPParam, gradient: Tensor) -> DTensor:
    spec = param._sharding_spec
    assert spec.tensor_meta is not None, "FSDP2 sets it when it divides a parameter"
    meta = spec.tensor_meta._replace(dtype=gradient.dtype)
    return DTensor(gradient, dataclasses.replace(spec, tensor_meta=meta), requires_grad=False)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
