"""Two steps of Muon on a sharded model with given gradients; see test_muon_on_ranks.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from patchgen.generated_models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM
from patchgen.runtime.parallel import ParallelConfig, sharding
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import optimizers
from patchgen.runtime.train.muon import Muon, Parts
from patchgen.runtime.train.recipe import OptimConfig
from patchgen.runtime.verify.small_config import small_config

LR = 0.1


def steps(experts: int, layout: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters before and after two steps, gathered.

    Args:
        layout: what `ParallelConfig.for_world` takes besides the world.
    """
    torch.manual_seed(0)
    # 18 rows of k_proj and v_proj, which four ranks divide as 5, 5, 5 and 3.
    config = small_config("qwen3_moe").config
    config.num_experts, config.head_dim, config.moe_intermediate_size = experts, 18, 12
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="eager")
    gradients = [{name: torch.randn_like(parameter) for name, parameter in model.named_parameters()} for _ in range(2)]
    state = ParallelState.create(ParallelConfig.for_world(dist.get_world_size(), **layout), "cpu")
    sharding.shard_model(model, state)
    optimizer = optimizers.build(model, OptimConfig(name="muon", lr=LR, muon_by_head=("*.q_proj.weight",)))
    (muon,) = (part for part in optimizer.parts if isinstance(part, Muon))
    taken = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    found = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in taken}
    before = {name: _whole(parameter).detach().clone() for name, parameter in found.items()}
    for step in gradients:
        for name, parameter in model.named_parameters():
            parameter.grad = _laid_out(step[name], parameter)
        optimizer.step()
    return before, {name: _whole(parameter).detach().clone() for name, parameter in found.items()}


def by_columns() -> tuple[Tensor, Tensor]:
    """A stack of alternating gates and ups, cut by columns over all ranks, after a step; gathered, and beside it a whole one."""
    torch.manual_seed(1)
    whole, gradient = torch.randn(2, 5, 12, 18)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut, cut_gradient = (distribute_tensor(one, mesh, [Shard(2)], src_data_rank=None) for one in (whole, gradient))
    found = []
    for value, its_gradient in ((cut, cut_gradient), (whole.clone(), gradient)):
        parameter = nn.Parameter(value)
        parameter.grad = its_gradient
        parts = {parameter: Parts(2, 1, alternating=True)}
        Muon([{"params": [parameter]}], lr=LR, weight_decay=0.1, momentum=0.9, parts=parts).step()
        found.append(_whole(parameter).detach())
    return found[0], found[1]


def _laid_out(full: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    """`full` with the placements of a parameter."""
    if not isinstance(parameter, DTensor):
        return full.clone()
    local = _region(full, parameter)
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def _region(full: Tensor, parameter: DTensor) -> Tensor:
    """This rank's part: the positions of a parameter's own elements, found by distributing their numbers in the same way."""
    numbers = torch.arange(full.numel()).view(full.shape)
    mesh, placements = parameter.device_mesh, parameter.placements
    if any(type(placement).__name__ == "_StridedShard" for placement in placements):
        # FSDP over shards of EP: first over ep, then over ep_shard.
        (inner,) = (dim for dim, placement in enumerate(placements) if type(placement).__name__ == "_StridedShard")
        for dim in (*(dim for dim in range(mesh.ndim) if dim != inner), inner):
            placement_dim = getattr(placements[dim], "dim", None)
            if placement_dim is not None:
                numbers = numbers.chunk(mesh.size(dim), placement_dim)[mesh.get_local_rank(dim)]
        return full.flatten()[numbers]
    distributed = distribute_tensor(numbers, mesh, placements, src_data_rank=None)
    return full.flatten()[distributed.to_local()]


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
