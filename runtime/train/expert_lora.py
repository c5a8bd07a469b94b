"""PEFT's adapters of stacked experts, laid out over the ranks as the experts are.

                     here, trained                             PEFT's file
    lora_A           [E, r, K]                                 [E * r, K], experts outside
    lora_B           [E, N, r]                                 [N, r * E], experts inside
    over the ranks   as the experts: ep, then FSDP2's ep_shard    whole

PEFT merges an adapter into its weight while the module runs; here the factors are handed to the seam of the experts, which
multiplies rows with them (`kernels/moe/adapters.py`). The modules and their order are PEFT's: it puts them in, and its file
is written from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from patchgen.kernels.moe.adapters import LowRank
from patchgen.runtime import expert_adapters
from patchgen.runtime.checkpoint.lazy_tensors import full_region
from patchgen.runtime.checkpoint.placement import local_region, narrow_to
from patchgen.runtime.parallel import checkpointing, sharding, undivided
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.state import ParallelState

ADAPTER = "default"


class Factor(nn.Module):
    """One factor of an adapter: `weight [E, ...]`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor), "a factor, of PEFT's or ours, is one tensor"
    return weight


class ExpertLora(ParamWrapper):
    """The adapter of one stacked parameter, around the experts or around the adapter of their other parameter.

    Args:
        state: experts are divided over its `ep`; so are the factors, of which every rank draws all.
    """

    def __init__(self, *args: Any, state: ParallelState, **kwargs: Any) -> None:
        self.parallel_state = state  # first, for PEFT fills the layer in its constructor
        super().__init__(*args, **kwargs)

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Makes the factors as PEFT does, of the same random numbers, and keeps this rank's part of them."""
        super().update_layer(adapter_name, *args, **kwargs)
        a, b = _weight(self.lora_A[adapter_name]).data, _weight(self.lora_B[adapter_name]).data
        count = self.num_experts
        self.lora_A[adapter_name] = Factor(self._own(a.view(count, -1, a.shape[1])))
        self.lora_B[adapter_name] = Factor(self._own(b.view(b.shape[0], -1, count).permute(2, 0, 1)))

    def _own(self, whole: Tensor) -> Tensor:
        wide = whole.to(torch.promote_types(whole.dtype, torch.float32)).contiguous()
        if self.parallel_state.ep == 1:
            return wide.clone()
        return distribute_tensor(wide, self.parallel_state.ep_mesh, [Shard(0)], src_data_rank=None)

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """`(left, right, scale)`, whose product has the layout of the parameter."""
        a, b = _weight(self.lora_A[adapter_name]), _weight(self.lora_B[adapter_name])
        # Which side A is of, PEFT decides; its first releases took every parameter as one that is transposed.
        swapped = getattr(self, "_did_swap_in_out_features", False)
        left, right = (b, a) if swapped else (a.transpose(1, 2), b.transpose(1, 2))
        return left, right, self.scaling[adapter_name]

    def get_delta_weight(self, adapter_name: str, *args: object, **kwargs: object) -> Tensor:
        """What the adapter adds to its parameter, `[E, ...]`, in the parameter's dtype."""
        left, right, scale = self.get_delta_factors(adapter_name)
        return (left @ right * scale).to(self.get_param().dtype)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not active:
            return super().forward(x, *args, **kwargs)
        if len(active) > 1:
            raise ValueError(f"One adapter of experts at a time is active, not {active}.")
        low_rank = LowRank(*self.get_delta_factors(active[0]))
        with expert_adapters.adding(self.get_base_layer(), self.parameter_name, low_rank):
            return self.base_layer(x, *args, **kwargs)


ExpertLora.__name__ = ParamWrapper.__name__  # by which PEFT knows what it may wrap once more


def custom_modules(model: nn.Module, parameters: tuple[str, ...], state: ParallelState) -> dict[type, partial]:
    """What PEFT is to put around the modules of these parameters."""
    owners = {type(model.get_submodule(name.rpartition(".")[0])) for name in parameters}
    return dict.fromkeys(owners, partial(ExpertLora, state=state))


def outermost(model: nn.Module) -> Iterator[ExpertLora]:
    """The adapters of experts, of those around one another the outer one."""
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, ExpertLora) and id(module) not in inside:
            inside |= {id(inner) for inner in module.modules()}
            yield module


def shard(model: nn.Module, state: ParallelState, options: sharding.ShardingOptions) -> int:
    """Divides the adapters of experts over the ranks as the experts are; returns the number of their units of FSDP2."""
    as_is = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype, cast_forward_inputs=False)
    units = list(outermost(model))
    for unit in units:
        factors = {p for module in unit.modules() if isinstance(module, Factor) for p in module.parameters()}
        sharded = fully_shard(
            unit,
            mesh=state.expert_fsdp_mesh,
            reshard_after_forward=options.reshard_after_forward,
            shard_placement_fn=lambda parameter: sharding.expert_placement(parameter, state),
            mp_policy=as_is,
            ignored_params=set(unit.parameters()) - factors,  # of the layer, or of the experts' own unit
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        undivided.install(unit)
        checkpointing.hide_hooks(unit)
    return len(units)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """A tensor of all ranks; every rank calls it."""
    if not isinstance(tensor, DTensor):
        return tensor
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank holds a part of an adapter"
    place = zip(coordinate, tensor.placements, strict=True)
    is_first = all(index == 0 for index, placement in place if isinstance(placement, Replicate))
    own = tensor.to_local()
    found = own.new_zeros(tensor.shape)
    if is_first:  # of the ranks that hold the same
        narrow_to(found, full_region(found.shape), local_region(tensor)).copy_(own)
    return all_reduce(found, operation="gather an adapter")


@torch.no_grad()
def part_of_delta(module: LoraLayer) -> tuple[nn.Parameter, Tensor]:
    """What an adapter changes, and what it adds to the part of it that this rank holds; every rank calls it."""
    if not isinstance(module, ExpertLora):
        layer: Any = module  # each of PEFT's layers says what it adds; the type of them all does not
        weight = layer.get_param() if isinstance(module, ParamWrapper) else layer.get_base_layer().weight
        delta = layer.get_delta_weight(ADAPTER)
        return weight, narrow_to(delta, full_region(delta.shape), local_region(weight))
    weight = module.get_param()
    left, right, scale = module.get_delta_factors(ADAPTER)
    experts, rows, columns = local_region(weight)
    ranks = (0, left.shape[2])
    left, right = whole(left.contiguous()), whole(right.contiguous())
    left, right = (
        narrow_to(left, full_region(left.shape), (experts, rows, ranks)),
        narrow_to(right, full_region(right.shape), (experts, ranks, columns)),
    )
    return weight, left @ right * scale


def in_peft_layout(model: nn.Module) -> dict[str, Tensor]:
    """The adapters of experts, whole and as PEFT saves them, by name in the state dict; every rank calls it."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, ExpertLora):
            a, b = (whole(_weight(factors[ADAPTER]).detach()) for factors in (module.lora_A, module.lora_B))
            found[f"{path}.lora_A.{ADAPTER}.weight"] = a.flatten(0, 1).cpu()
            found[f"{path}.lora_B.{ADAPTER}.weight"] = b.permute(1, 2, 0).flatten(1, 2).cpu()
    return found
