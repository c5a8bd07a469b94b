"""Run by test_selfcheck_on_ranks.py under torchrun on two GPUs: a run after the check of slices has the bits of one without it."""

from __future__ import annotations

import itertools
import os

import cases_selfcheck as cases
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig

from patchgen.generated_models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM
from patchgen.runtime import attention, seams
from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.sharding import ShardingOptions
from patchgen.runtime.parallel.state import ParallelState

SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32}
SIZES |= {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def build() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM._from_config(
        Qwen3MoeConfig(**SIZES, use_cache=False), attn_implementation="patchgen_sdpa"
    )


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    attention.register()
    states = [ParallelState.create(ParallelConfig.for_world(2, sp=2, ep=ep), "cuda") for ep in (1, 2)]
    kept = {"reshard_after_forward": False}
    layouts = itertools.product(states, (None, torch.bfloat16), ("auto", "collectives"), ({}, kept))
    compiled = (states[1], torch.bfloat16, "auto", {"compile_layers": True})
    for state, dtype, exchange, options in (*layouts, compiled):
        sharding_options = ShardingOptions(param_dtype=dtype, shard_exchange=exchange, **options)
        with seams.using(fused_moe="torch" if dtype is None else "triton"):
            cases.require_no_trace(build, state, SIZES["vocab_size"], "full", sharding_options, "cuda")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
