"""A recipe for a qwen3_moe of three narrow layers, with any of its sections changed."""

from __future__ import annotations

from patchgen.runtime.train.recipe import Recipe, from_dict

SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def recipe_of(**sections: dict) -> Recipe:
    base = {"source": "qwen3_moe", "overrides": SMALL}
    values = {"model": base, "data": {"tokens_per_batch": 256}, "train": {"steps": 10, "batches_per_step": 8}}
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return from_dict(values)
