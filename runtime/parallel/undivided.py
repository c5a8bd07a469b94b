"""FSDP2 units on a mesh of one rank: nothing is gathered or reduced, so nothing needs to be copied.

On a mesh of one rank FSDP2 still copies everything as if it came from others. Bytes per parameter and step, for fp32
parameters and bf16 compute:

    FSDP2     cast, then copied, before the forward and again before the backward                         20
              gradient widened, divided by one, copied                                                    22
    here      cast into a persistent copy before the forward                                               6
              or written by the optimizer in its step (`train/adamw.py`)                                    2
              gradient passed on uncast, if the optimizer takes it so (`grad_dtype` None)                   0

This covers one GPU without sharding, and experts that are each on one rank (`ep_shard` 1). The results are FSDP2's: the same
cast, and gradients of several micro-batches are summed in the dtype of the parameter.

A copy that an optimizer wrote is used in training until another optimizer takes a step or the parameter is changed otherwise.
Changes are detected by autograd's version counters, which `parameter.data` and `torch._foreach_...` on DTensors do not
increment: after such a change outside an optimizer, call `forget_copies(model)`. In evaluation every forward casts.
"""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from patchgen.kernels.moe import early_gradients

if TYPE_CHECKING:
    from patchgen.kernels.moe.fp8_kept import KeptForms

COPY = "_patchgen_compute_copy"  # on a parameter: its ComputeCopy


class _OtherOptimizers:
    """The number of steps of optimizers that write no copies: torch's change DTensors without incrementing versions."""

    num_steps = 0


def _count_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    _OtherOptimizers.num_steps += not getattr(optimizer, "writes_copies", False)


register_optimizer_step_post_hook(_count_step)


@dataclass
class ComputeCopy:
    """The copy of a parameter that a layer computes with.

    Attributes:
        tensor: flat, in the compute dtype.
        written: the identity of the parameter when an optimizer wrote the tensor; None: unknown.
        forms: what the experts keep of the tensor in FP8 until it is written; see `keep_fp8`.
    """

    tensor: Tensor
    written: tuple[int, ...] | None = None
    forms: KeptForms | None = None

    def is_current(self, parameter: nn.Parameter) -> bool:
        return self.written == _identity(parameter)

    def before_writing(self) -> None:
        """To be called before the tensor is written."""
        if self.forms is not None:
            self.forms.forget()

    def mark_written(self, parameter: nn.Parameter) -> None:
        """Records that the tensor equals the parameter, and so does what was to be written of it in FP8."""
        self.written = _identity(parameter)
        if self.forms is not None:
            self.forms.mark_written()


def _identity(parameter: nn.Parameter) -> tuple[int, ...]:
    shard = local(parameter)
    return id(shard), shard.data_ptr(), shard._version, parameter._version, _OtherOptimizers.num_steps


def copy_of(parameter: nn.Parameter) -> ComputeCopy | None:
    """The copy of a parameter, for an optimizer that writes it in its step; None if there is none."""
    return getattr(parameter, COPY, None)


def forget_copies(model: nn.Module) -> None:
    """Lets the next forward cast all parameters again."""
    for parameter in model.parameters():
        if (copy := copy_of(parameter)) is not None:
            copy.written = None


_KEEPS_TRANSPOSED = "_patchgen_keeps_transposed"  # on a group of parameters, see `keep_fp8`


def keep_fp8(model: nn.Module, *, transposed: bool) -> int:
    """Lets the experts in FP8 keep their quantised weights within a step; returns in how many units.

    Only in units on a mesh of one rank: what others gather is freed after each layer.

    Args:
        transposed: also what the backward reads, for steps of several micro-batches.
    """
    count = 0
    for module in model.modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            if isinstance(group, UndividedGroup) and any(_is_stacked(param) for param in group.fsdp_params):
                setattr(group, _KEEPS_TRANSPOSED, transposed)
                count += 1
    return count


def _is_stacked(param: FSDPParam) -> bool:
    """Whether it can be a weight of experts, `[E, ...]`."""
    return param.sharded_param.dim() == 3


def install(model: nn.Module) -> int:
    """Lets the units of a sharded model on a mesh of one rank keep copies; returns how many there are."""
    count = 0
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                if type(group) is FSDPParamGroup and _is_undivided(group):
                    group.__class__ = UndividedGroup
                    count += 1
    return count


def param_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """The parameter groups of one unit; later releases of torch may have several."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _is_undivided(group: FSDPParamGroup) -> bool:
    mesh = group.mesh_info
    offloads = any(param.offload_to_cpu for param in group.fsdp_params)
    return type(mesh) is FSDPMeshInfo and mesh.shard_mesh_size == 1 and not offloads  # not replicated either


class UndividedGroup(FSDPParamGroup):
    """The parameter group of one unit on a mesh of one rank."""

    @property
    def keeps_copies(self) -> bool:
        """Whether all parameters are trained, decided at first use: a copy of a frozen one would only cost memory."""
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
            is_backward = self._training_state == TrainingState.PRE_BACKWARD  # the forward has updated the copies
            for param in self.fsdp_params:
                _set_up_compute_copy(param, may_be_stale=is_backward, trusts_optimizer=self.modules[0].training)
                _set_up_fp8(param, getattr(self, _KEEPS_TRANSPOSED, None))
            self._to_unsharded()

    def post_backward(self, *unused: object) -> None:
        if not self.keeps_copies:
            super().post_backward(*unused)
            return
        self._training_state = TrainingState.POST_BACKWARD
        self._move_gradients()
        if self.reshard_after_backward:
            self.reshard()

    def finalize_backward(self) -> None:
        if self.keeps_copies:
            early_gradients.compute_deferred()
            self._move_gradients()  # of parameters used after the unit's own backward
        super().finalize_backward()

    @torch.no_grad()
    def _move_gradients(self) -> None:
        for param in self.fsdp_params:
            _move_gradient(param)


@torch.no_grad()
def _set_up_compute_copy(param: FSDPParam, *, may_be_stale: bool, trusts_optimizer: bool) -> None:
    """Sets FSDP2's unsharded parameter to the values of the sharded one, cast to the compute dtype."""
    parameter, source = param.sharded_param, param._sharded_local_tensor
    dtype = param.param_dtype or source.dtype
    if dtype == source.dtype:
        _set_unsharded(param, source.view(-1))  # nothing to cast
        return
    copy = getattr(param, COPY, None)
    if copy is None:
        copy, may_be_stale = ComputeCopy(torch.empty(source.numel(), dtype=dtype, device=source.device)), False
        setattr(param, COPY, copy)
    setattr(parameter, COPY, copy)
    if not may_be_stale and not (trusts_optimizer and copy.is_current(parameter)):
        copy.before_writing()
        copy.written = None
        with torch.autograd._unsafe_preserve_version_counter(copy.tensor):  # pyright: ignore[reportPrivateImportUsage]
            copy.tensor.copy_(source.view(-1))
    _set_unsharded(param, copy.tensor)


def _set_up_fp8(param: FSDPParam, keeps_transposed: bool | None) -> None:
    copy: ComputeCopy | None = getattr(param, COPY, None)
    if keeps_transposed is not None and copy is not None and copy.forms is None and _is_stacked(param):
        from patchgen.kernels.moe import fp8_kept  # loads Triton

        copy.forms = fp8_kept.keep(copy.tensor, transposed=keeps_transposed)


def _set_unsharded(param: FSDPParam, values: Tensor) -> None:
    """Sets FSDP2's unsharded parameter to these flat values, which it must never free."""
    if hasattr(param, "_unsharded_param"):
        if local(param._unsharded_param).data_ptr() == values.data_ptr():
            return
        del param._unsharded_param
    param.all_gather_outputs = [values]
    param.init_unsharded_param()
    param.all_gather_outputs = []
    # Weak, because Python does not free cycles through a tensor's attributes.
    setattr(
        param._unsharded_param,
        early_gradients.DEFERRED_GRADIENT_SINK,
        partial(_add_deferred_gradient, weakref.ref(param)),
    )


def _move_gradient(param: FSDPParam) -> None:
    """Moves the gradient of the unsharded parameter to the sharded one, adding to an existing gradient."""
    computed = getattr(param, "_unsharded_param", None)
    if computed is not None and computed.grad is not None:
        new, computed.grad = param._get_grad_inner_tensor(computed.grad), None
        _add_gradient(param, new)


def _add_deferred_gradient(reference: weakref.ref[FSDPParam], gradient: Tensor) -> None:
    """Adds a gradient that was computed after its layer's backward (`kernels/moe/early_gradients.py`)."""
    param = reference()
    if param is None:
        raise RuntimeError("A deferred gradient was computed for a parameter that was freed.")
    _add_gradient(param, gradient)


def _add_gradient(param: FSDPParam, new: Tensor) -> None:
    """Sets the parameter's gradient to `new`, in the dtype it was computed in, or adds it."""
    target = param.sharded_param
    if target.grad is None:
        as_computed = target.grad_dtype is None
        target.grad = _as_dtensor(param, new if as_computed else new.to(target.dtype))
    elif target.grad.dtype == target.dtype:
        local(target.grad).add_(new)
    else:
        target.grad = _as_dtensor(param, local(target.grad).to(target.dtype).add_(new))
    for hook in (getattr(target, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(target)


def _as_dtensor(param: FSDPParam, gradient: Tensor) -> DTensor:
    spec = param._sharding_spec
    assert spec.tensor_meta is not None, "FSDP2 sets it when it divides a parameter"
    meta = spec.tensor_meta._replace(dtype=gradient.dtype)
    return DTensor(gradient, dataclasses.replace(spec, tensor_meta=meta), requires_grad=False)


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; other tensors unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
