"""What upstream keeps in fp32, on shards; see test_kept_dtypes_on_ranks.py."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

from patchgen.generated_models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from patchgen.runtime import kept_dtypes, parallel
from patchgen.runtime.parallel import ParallelConfig, gradients, loss, sharding
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify.model_pair import perturb
from patchgen.runtime.verify.small_config import small_config

LENGTH = 16


def models() -> tuple[nn.Module, nn.Module, set[str]]:
    """deepseek_v4 in fp32, the same numbers stored in bf16 beside what is kept, and the names of that."""
    torch.manual_seed(0)
    reference = DeepseekV4ForCausalLM._from_config(small_config("deepseek_v4").config, attn_implementation="eager")
    perturb(reference.train())
    is_kept = kept_dtypes.keeps_in_fp32(reference, torch.bfloat16)
    kept = {name for name, _ in reference.named_parameters() if is_kept(name)}
    for name, parameter in reference.named_parameters():
        parameter.data = parameter.data if name in kept else parameter.data.bfloat16().float()
    narrow = copy.deepcopy(reference)
    for name, parameter in narrow.named_parameters():
        parameter.data = parameter.data if name in kept else parameter.data.bfloat16()
    return reference, narrow, kept


def step_of_shards() -> tuple[float, dict[str, torch.dtype], set[str]]:
    """A step computed in fp32 on bf16 shards.

    Returns:
        The largest relative difference of the loss and of a gradient of what is kept from one process with all rows; the dtypes of
        all parameters after the step; the names of what is kept.
    """
    reference, model, kept = models()
    rows = torch.randint(3, 60, (dist.get_world_size(), LENGTH), generator=torch.Generator().manual_seed(1))
    items = torch.tensor(rows.shape[0] * (LENGTH - 1))
    whole = reference(input_ids=rows, labels=rows, num_items_in_batch=items, use_cache=False).loss
    whole.backward()
    state = ParallelState.create(ParallelConfig.for_world(dist.get_world_size()), "cpu")
    wide = sharding.ShardingOptions(param_dtype=torch.float32, reduce_dtype=torch.float32)
    sharding.shard_model(model, state, options=wide)
    row = rows[dist.get_rank()][None]
    with parallel.using(state), loss.step(items, 1):
        share = model(input_ids=row, labels=row, num_items_in_batch=items, use_cache=False).loss
        share.backward()
    total = share.detach().clone()
    dist.all_reduce(total)
    differences = [float((total - whole.detach()).abs() / whole.detach())]
    own, gradient_of = dict(reference.named_parameters()), {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient_of[name] = parameter.grad.full_tensor()
    largest = max(parameter.grad.norm() for parameter in own.values() if parameter.grad is not None)
    for name in kept & gradient_of.keys():
        if (expected := own[name].grad) is not None:
            size = max(expected.norm(), 1e-2 * largest)
            differences.append(float((gradient_of[name] - expected).norm() / size))
    optimizer = torch.optim.AdamW(sharding.optimizer_groups(model), lr=1e-3)
    gradients.clip(model, max_norm=1.0, optimizer=optimizer)
    optimizer.step()
    return max(differences), {name: parameter.dtype for name, parameter in model.named_parameters()}, kept


def dtypes_in_the_forward(stored: torch.dtype, param_dtype: torch.dtype | None) -> set[torch.dtype]:
    """In which dtypes attention sees the parameters that it keeps beside projections."""
    reference, narrow, _ = models()
    model = reference if stored == torch.float32 else narrow
    state = ParallelState.create(ParallelConfig.for_world(dist.get_world_size()), "cpu")
    sharding.shard_model(model, state, options=sharding.ShardingOptions(param_dtype=param_dtype))
    seen: set[torch.dtype] = set()
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.register_forward_pre_hook(lambda module, _: seen.add(module.sinks.dtype))
        attention.compressor.register_forward_pre_hook(lambda module, _: seen.add(module.position_bias.dtype))
    row = torch.arange(3, 3 + LENGTH)[None]
    with parallel.using(state), torch.no_grad():
        model(input_ids=row, use_cache=False)
    return seen
