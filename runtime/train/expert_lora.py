"""PEFT's adapters of stacked experts, sharded like the experts.

                     here, trained                             PEFT's file
    lora_A           [E, r, K]                                 [E * r, K], experts outermost
    lora_B           [E, N, r]                                 [N, r * E], experts innermost
    sharding         as the experts: ep, then FSDP2's ep_shard    full tensors

    E experts    r rank of the adapter    K, N sizes of the two sides of a weight, as PEFT assigns them to A and B

PEFT merges an adapter into its weight while the module runs; here the experts' seam gets the factors and multiplies rows with
them (`kernels/moe/adapters.py`). PEFT itself inserts the modules, and saves the file under their names.
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

ADAPTER_NAME = "default"


class Factor(nn.Module):
    """One factor of an adapter: `weight [E, ...]`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor), "a factor is one tensor, in PEFT's layers and in ours"
    return weight


class ExpertLora(ParamWrapper):
    """The adapter of one stacked parameter; wraps the experts, or the adapter of another of their parameters.

    Args:
        state: factors are sharded over its `ep` like the experts; every rank initialises the full factors.
    """

    def __init__(self, *args: Any, state: ParallelState, **kwargs: Any) -> None:
        self.parallel_state = state  # first: PEFT's constructor calls update_layer
        super().__init__(*args, **kwargs)

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Initialises the factors as PEFT does, with the same random numbers, and keeps this rank's shard."""
        super().update_layer(adapter_name, *args, **kwargs)
        a, b = _weight(self.lora_A[adapter_name]).data, _weight(self.lora_B[adapter_name]).data
        count = self.num_experts
        self.lora_A[adapter_name] = Factor(self._shard(a.view(count, -1, a.shape[1])))
        self.lora_B[adapter_name] = Factor(self._shard(b.view(b.shape[0], -1, count).permute(2, 0, 1)))

    def _shard(self, full: Tensor) -> Tensor:
        full = full.to(torch.promote_types(full.dtype, torch.float32)).contiguous()
        if self.parallel_state.ep == 1:
            return full.clone()
        return distribute_tensor(full, self.parallel_state.ep_mesh, [Shard(0)], src_data_rank=None)

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """`left [E, rows, r]`, `right [E, r, columns]` and the scale: their product has the layout of the parameter."""
        a, b = _weight(self.lora_A[adapter_name]), _weight(self.lora_B[adapter_name])
        # PEFT decides whether A is the input or the output side; its first releases assumed transposed parameters.
        swapped = getattr(self, "_did_swap_in_out_features", False)
        left, right = (b, a) if swapped else (a.transpose(1, 2), b.transpose(1, 2))
        return left, right, self.scaling[adapter_name]

    def get_delta_weight(self, adapter_name: str, *args: object, **kwargs: object) -> Tensor:
        """The adapter's delta of its parameter, `[E, ...]`, in the parameter's dtype."""
        left, right, scale = self.get_delta_factors(adapter_name)
        return (left @ right * scale).to(self.get_param().dtype)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not active:
            return super().forward(x, *args, **kwargs)
        if len(active) > 1:
            raise ValueError(f"Only one adapter of experts can be active at a time, not {active}.")
        low_rank = LowRank(*self.get_delta_factors(active[0]))
        with expert_adapters.applied(self.get_base_layer(), self.parameter_name, low_rank):
            return self.base_layer(x, *args, **kwargs)


ExpertLora.__name__ = ParamWrapper.__name__  # PEFT checks this name before it wraps a wrapper again


def custom_modules(model: nn.Module, parameters: tuple[str, ...], state: ParallelState) -> dict[type, partial]:
    """Classes that own these parameters -> the wrapper that PEFT is to use for them."""
    owners = {type(model.get_submodule(name.rpartition(".")[0])) for name in parameters}
    return dict.fromkeys(owners, partial(ExpertLora, state=state))


def _outermost_adapters(model: nn.Module) -> Iterator[ExpertLora]:
    """The expert adapters that no other expert adapter wraps."""
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, ExpertLora) and id(module) not in inside:
            inside |= {id(inner) for inner in module.modules()}
            yield module


def shard(model: nn.Module, state: ParallelState, options: sharding.ShardingOptions) -> int:
    """Shards the expert adapters like the experts; returns the number of their FSDP2 units."""
    policy = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype, cast_forward_inputs=False)
    units = list(_outermost_adapters(model))
    for unit in units:
        factors = {p for module in unit.modules() if isinstance(module, Factor) for p in module.parameters()}
        sharded = fully_shard(
            unit,
            mesh=state.expert_fsdp_mesh,
            reshard_after_forward=options.reshard_after_forward,
            shard_placement_fn=lambda parameter: sharding.expert_placement(parameter, state),
            mp_policy=policy,
            ignored_params=set(unit.parameters()) - factors,  # they belong to the unit of the layer or of the experts
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        undivided.install(unit)
        checkpointing.hide_hooks(unit)
    return len(units)


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks (collective)."""
    if not isinstance(tensor, DTensor):
        return tensor
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank has a shard of an adapter"
    mesh_axes = zip(coordinate, tensor.placements, strict=True)
    is_first_replica = all(index == 0 for index, placement in mesh_axes if isinstance(placement, Replicate))
    local = tensor.to_local()
    full = local.new_zeros(tensor.shape)
    if is_first_replica:
        narrow_to(full, full_region(full.shape), local_region(tensor)).copy_(local)
    return all_reduce(full, operation="gather an adapter")


@torch.no_grad()
def local_delta(module: LoraLayer) -> tuple[nn.Parameter, Tensor]:
    """The parameter that an adapter changes, and the delta of this rank's shard of it (collective)."""
    if not isinstance(module, ExpertLora):
        layer: Any = module  # every PEFT layer has get_delta_weight; their base type does not declare it
        weight = layer.get_param() if isinstance(module, ParamWrapper) else layer.get_base_layer().weight
        delta = layer.get_delta_weight(ADAPTER_NAME)
        return weight, narrow_to(delta, full_region(delta.shape), local_region(weight))
    weight = module.get_param()
    left, right, scale = module.get_delta_factors(ADAPTER_NAME)
    experts, rows, columns = local_region(weight)
    rank_range = (0, left.shape[2])
    left, right = full_tensor(left.contiguous()), full_tensor(right.contiguous())
    left, right = (
        narrow_to(left, full_region(left.shape), (experts, rows, rank_range)),
        narrow_to(right, full_region(right.shape), (experts, rank_range, columns)),
    )
    return weight, left @ right * scale


def in_peft_layout(model: nn.Module) -> dict[str, Tensor]:
    """The full expert adapters as PEFT saves them, by their names in the state dict (collective)."""
    state_dict = {}
    for path, module in model.named_modules():
        if isinstance(module, ExpertLora):
            a, b = (full_tensor(_weight(factors[ADAPTER_NAME]).detach()) for factors in (module.lora_A, module.lora_B))
            state_dict[f"{path}.lora_A.{ADAPTER_NAME}.weight"] = a.flatten(0, 1).cpu()
            state_dict[f"{path}.lora_B.{ADAPTER_NAME}.weight"] = b.permute(1, 2, 0).flatten(1, 2).cpu()
    return state_dict
