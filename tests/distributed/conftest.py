"""Pools of ranks, shared by all tests of a session."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from patchgen.runtime.verify.ranks import RankPool

# One rank is one thread: more of them only fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def one_rank():
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def eight_ranks():
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks():
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def trainer_folder(tmp_path_factory) -> Path:
    """Weights and tokenizer as upstream saves them, and text: files of the standard library."""
    import ast
    import sysconfig

    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from patchgen.runtime.data import DataConfig, SourceConfig, train_tokenizer

    place = tmp_path_factory.mktemp("trainer")
    sources = [Path(sysconfig.get_path("stdlib")) / f"{name}.py" for name in ("ast", "bisect", "heapq", "shelve")]
    with (place / "text.jsonl").open("w") as file:
        for source in sources:
            for node in ast.parse(text := source.read_text()).body:
                file.write(json.dumps({"text": ast.get_source_segment(text, node)}) + "\n")
    data = DataConfig(sources=(SourceConfig(str(place / "text.jsonl")),), cache_dir=str(place / "cache"))
    train_tokenizer(data, vocab_size=300).save_pretrained(place / "start")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
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
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.1,
        use_cache=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(place / "start")
    return place
