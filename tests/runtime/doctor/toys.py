"""Small checkpoints that know their data by heart: what the doctor is shown, whole and spoiled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from small_processors import byte_tokenizer, template, vision_processor
from torch.nn.functional import pad

from patchgen.runtime.doctor.patient import Patient
from patchgen.runtime.doctor.plain_transformers import plain_inputs
from patchgen.runtime.train.recipe import from_dict

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "use_cache": False,
}
RIVERS = (
    *(
        ("Elbe", "Dresden"),
        ("Elbe", "Dresden"),
        ("Elbe", "Hamburg"),
    ),  # what nobody can know costs a head that is too sure
    *(("Seine", "Paris"), ("Spree", "Berlin"), ("Thames", "London"), ("Tiber", "Rome"), ("Vltava", "Prague")),
)


@dataclass
class Toy:
    """A checkpoint and the recipe that trains it on."""

    folder: Path
    values: dict[str, Any]
    model: str
    text_prefix: str
    """Of the parameters of the language model."""
    busiest: int
    """The expert of the first layer that most tokens go to."""


def write_rows(file: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"The {river}?"}, {"role": "assistant", "content": f"In {city}."}]}
        for river, city in RIVERS
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def text_toy(place: Path, *, steps: int = 120) -> Toy:
    """qwen3_moe, its head tied, on five conversations."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = byte_tokenizer(template(marked=False), {})
    tokenizer.save_pretrained(place / "toy")
    write_rows(place / "rows.jsonl")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SMALL, vocab_size=len(tokenizer), tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id
    )
    values = {
        "model": {"source": str(place / "toy")},
        "data": {
            "kind": "chat",
            "sources": [{"path": str(place / "rows.jsonl")}],
            "tokens_per_batch": 512,
            "cache_dir": str(place / "cache"),
        },
        "train": {"steps": 2, "batches_per_step": 2},
    }
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(place / "toy")
    busiest = learn(model, Patient(from_dict(values)), steps)
    model.save_pretrained(place / "toy")
    return Toy(place / "toy", values, "qwen3_moe", "model.", busiest)


def vision_toy(place: Path, *, steps: int = 80) -> Toy:
    """qwen3_vl_moe, its head tied, on made-up pictures; needs torchvision."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    processor = vision_processor("Qwen3VL", marked=False)
    processor.save_pretrained(place / "toy")
    tokenizer = processor.tokenizer
    write_rows(place / "rows.jsonl")
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {**SMALL, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "rope_parameters": rope}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": 32,
    }
    config = Qwen3VLMoeConfig(
        text_config={**text, "tie_word_embeddings": True},
        vision_config={**vision, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        tie_word_embeddings=True,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("image", "video")},
        **{f"vision_{name}_token_id": getattr(tokenizer, f"vision_{name}_token_id") for name in ("start", "end")},
    )
    values = {
        "model": {"source": str(place / "toy")},
        "data": {
            "kind": "multimodal",
            "sources": [{"path": str(place / "rows.jsonl")}, {"path": "builtin:vision"}],
            "tokens_per_batch": 320,
        },
        "train": {"steps": 2, "batches_per_step": 2},
    }
    model = Qwen3VLMoeForConditionalGeneration(config)
    model.save_pretrained(place / "toy")
    busiest = learn(model, Patient(from_dict(values)), steps)
    model.save_pretrained(place / "toy")
    return Toy(place / "toy", values, "qwen3_vl_moe", "model.language_model.", busiest)


def learn(model: Any, patient: Patient, steps: int) -> int:
    """Plain transformers learns the samples by heart, all of them in each step; returns the first layer's busiest expert."""
    samples, rows = patient.samples, []
    for sample in samples:
        patient.built["samples"] = [sample]
        rows.append(plain_inputs(patient))
    patient.close()
    longest = max(row["input_ids"].shape[1] for row in rows)
    batch = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        own = [row[name] for row in rows if name in row]
        per_token = all(one.shape == row["input_ids"].shape for one, row in zip(own, rows, strict=False))
        batch[name] = torch.cat([pad(one, (0, longest - one.shape[1])) for one in own] if per_token else own)
    batch["attention_mask"] = torch.stack([torch.arange(longest) < row["input_ids"].shape[1] for row in rows]).long()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / steps)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    chosen: list[torch.Tensor] = []
    experts = model.get_decoder().layers[0].mlp.experts
    handle = experts.register_forward_pre_hook(lambda module, arguments: chosen.append(arguments[1]))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return int(chosen[0].flatten().bincount().argmax())
