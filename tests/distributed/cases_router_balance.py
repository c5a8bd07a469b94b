"""Runs whose routers have a bias for selection alone, which is moved after each step; see test_router_balance_on_ranks.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import cases_trainer
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from patchgen.runtime.train.recipe import from_dict
from patchgen.runtime.train.records import Summary
from patchgen.runtime.train.trainer import Trainer

BUSY = [2, 5]
EXPERTS, PER_TOKEN = 8, 2
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "use_cache": False,
}
OPTIONS = {
    "deepseek_v3": {
        "n_routed_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
    "ernie4_5_moe": {
        "moe_num_experts": EXPERTS, "moe_k": PER_TOKEN, "moe_layer_start_index": 0, "moe_layer_interval": 1,
        "moe_num_shared_experts": 0, "tie_word_embeddings": False, "head_dim": 8,
    },
}  # fmt: skip
"""Model type -> fields of a small config: the bias of one is a buffer, that of the other a parameter without a gradient."""


def collapsed_checkpoint(start: Path, target: Path, model_type: str) -> Path:
    """Weights with which every token of both layers goes to the experts `BUSY`, beside the tokenizer in `start`."""
    shutil.copytree(start, target, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **OPTIONS[model_type]))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.3
        for layer in model.model.layers:
            layer.mlp.gate.weight[BUSY, 0] = 2.0
    model.save_pretrained(target)
    return target


def train(values: dict) -> tuple[list[float], list[float], dict[str, list[float]], Summary]:
    """Losses, the load of the busiest expert of each step, the biases after a run, and its end."""
    kept = cases_trainer.Kept()
    trainer = Trainer(from_dict(values), torch.device("cpu"), (kept,))
    summary = trainer.run()
    loads = [record.expert_load for record in kept.steps if record.expert_load is not None]
    return [record.loss for record in kept.steps], loads, _biases_of(trainer.model), summary


def exported_biases(export: Path) -> dict[str, list[float]]:
    """The biases in an export, as upstream's own class loads them."""
    return _biases_of(AutoModelForCausalLM.from_pretrained(export))


def _biases_of(model: torch.nn.Module) -> dict[str, list[float]]:
    """Name -> values (collective, of a sharded model)."""
    biases = {name: tensor for name, tensor in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in biases.items()}
    return {name: tensor.flatten().tolist() for name, tensor in full.items()}
