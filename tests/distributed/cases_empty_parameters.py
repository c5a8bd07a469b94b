"""A parameter without elements, which some files have as a placeholder; see test_empty_parameters.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from patchgen.generated_models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from patchgen.runtime import parallel
from patchgen.runtime.parallel import ParallelConfig, gradients, loss, sharding
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify.small_config import small_config

LENGTH = 16


def steps(has_gradient: bool) -> list[float]:
    """The losses of two steps of a model with such a parameter on shards."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM._from_config(small_config("qwen3").config, attn_implementation="eager").train()
    model.model.placeholder = nn.Parameter(torch.empty(0, 8))
    state = ParallelState.create(ParallelConfig.for_world(dist.get_world_size()), "cpu")
    sharding.shard_model(model, state)
    optimizer = torch.optim.AdamW(sharding.optimizer_groups(model), lr=1e-2)
    row = torch.randint(3, 60, (1, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
    items, losses = torch.tensor(dist.get_world_size() * (LENGTH - 1)), []
    for _ in range(2):
        with parallel.using(state), loss.step(items, 1):
            share = model(input_ids=row, labels=row, num_items_in_batch=items, use_cache=False).loss
            share.backward()
        if has_gradient:
            model.model.placeholder.grad = torch.zeros_like(model.model.placeholder)
        losses.append(float(share))
        gradients.clip(model, max_norm=1.0, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return losses
