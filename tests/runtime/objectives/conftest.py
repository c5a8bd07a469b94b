"""One rank in this process, and a small generated model beside upstream's with the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from patchgen.runtime import attention, registry
from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState


@pytest.fixture(scope="session")
def state():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ParallelState.create(ParallelConfig.for_world(1), "cpu")
    dist.destroy_process_group()


@pytest.fixture
def config():
    return Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        pad_token_id=0,
        use_cache=False,
    )


def of_upstream(config, seed: int) -> Qwen3MoeForCausalLM:
    """Transformers' model with random weights."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)


def generated(upstream, head=None):
    """The generated model with the weights of one of transformers'."""
    head = head or registry.find_head(upstream.config)
    attention.register()
    made = {"attn_implementation": "patchgen_sdpa", "dtype": torch.float32}
    model = head._from_config(copy.deepcopy(upstream.config), **made)
    model.load_state_dict(upstream.state_dict())
    return model
