"""A small checkpoint of upstream."""

from __future__ import annotations

import pytest
import small_models


@pytest.fixture(scope="module")
def original():
    """Upstream's model with weights of its own."""
    from transformers import Qwen3MoeForCausalLM

    return small_models.build(Qwen3MoeForCausalLM, small_models.moe_config())


@pytest.fixture(scope="module")
def checkpoint(original, tmp_path_factory):
    """As upstream saves it, with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("upstream")
    original.save_pretrained(folder, max_shard_size="10KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("of the original")
    return folder
