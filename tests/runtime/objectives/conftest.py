"""One rank in this process, and the config of a small model."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from transformers import Qwen3MoeConfig

from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState


@pytest.fixture(scope="module")
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
