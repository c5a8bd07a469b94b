"""What the targets of adapters mean on models with towers: PEFT's syntax, towers where they are named."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from patchgen.runtime.train.lora_targets import find_targets
from patchgen.runtime.train.recipe import LoraConfig, RecipeError


@pytest.fixture(scope="module")
def hearing():
    """A language model of two layers beside an audio tower of one; both have a q_proj."""
    text = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 64,
    }
    audio = {"encoder_layers": 1, "d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    with torch.device("meta"):
        config = Qwen2AudioConfig(text_config=text | {"num_attention_heads": 4}, audio_config=audio)
        return Qwen2AudioForConditionalGeneration._from_config(config)


def test_defaults_leave_a_tower_alone_and_the_run_says_so(hearing):
    found = find_targets(hearing, LoraConfig())
    assert len(found.modules) == 2 * 4 and all("language_model" in name for name in found.modules)
    assert found.summary == (
        "adapters on 8 modules: 8 in the language model; not on 3 in audio_tower: lora.target_modules does not name the "
        "tower"
    )


TOWERS = {
    "by a path": (["audio_tower.layers.0.self_attn.q_proj"], 0, 1),
    "by a path beside endings": (["q_proj", "audio_tower.layers.0.self_attn.v_proj"], 2, 1),
    "by an ending that nothing else has": (["out_proj"], 0, 1),
    "by an expression": (".*(language_model|audio_tower).*q_proj", 2, 1),
    "not by an expression that does not name it": (".*q_proj", 2, 0),
    "all linear layers, but for the head": ("all-linear", 2 * 7, 0),
}


@pytest.mark.parametrize("case", TOWERS)
def test_a_tower_is_adapted_where_it_is_named(case, hearing):
    targets, inside, heard = TOWERS[case]
    found = find_targets(hearing, LoraConfig(target_modules=targets))
    assert (len(found.modules) - found.towers.get("audio_tower", 0), found.towers.get("audio_tower", 0)) == (
        inside,
        heard,
    )


def test_expressions_exclusions_and_layers_are_those_of_peft(hearing):
    found = find_targets(hearing, LoraConfig(target_modules=".*language_model.*q_proj"))
    assert [name.rpartition("layers.")[2] for name in found.modules] == ["0.self_attn.q_proj", "1.self_attn.q_proj"]
    assert len(find_targets(hearing, LoraConfig(target_modules=["q_proj"], layers_to_transform=(1,))).modules) == 1
    only = LoraConfig(target_modules=["q_proj", "k_proj"], exclude_modules=".*layers.0.*")
    assert {name.rpartition(".layers.")[2][0] for name in find_targets(hearing, only).modules} == {"1"}
    with pytest.raises(
        RecipeError,
        match=r"nothing in Qwen2Audio.* matches .*expression as a string: target_modules: '\.\*language_model",
    ):
        find_targets(hearing, LoraConfig(target_modules=["language_model.*.q_proj"]))
    with pytest.raises(RecipeError, match=r"is not a valid regular expression: "):
        find_targets(hearing, LoraConfig(target_modules=".*(q_proj"))
    with pytest.raises(RecipeError, match=r"nothing in .* matches q_proj with lora.layers_to_transform"):
        find_targets(hearing, LoraConfig(target_modules=["q_proj"], layers_to_transform=(7,)))
    with pytest.raises(RecipeError, match=r"layers_to_transform needs lora.target_modules as a list"):
        find_targets(hearing, LoraConfig(target_modules=".*q_proj", layers_to_transform=(1,)))


class Clipped(nn.Module):
    """A linear layer whose inputs are clipped, as gemma4's towers have."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.clamp(-1, 1))


def test_a_wrapped_linear_layer_is_found_in_what_wraps_it():
    import peft

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=8
    )
    model = LlamaForCausalLM._from_config(config)
    attention = model.model.layers[0].self_attn
    attention.q_proj = Clipped(attention.q_proj)
    found = find_targets(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    assert found.modules == ("model.layers.0.self_attn.q_proj.linear", "model.layers.0.self_attn.v_proj")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=list(found.modules)))
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 2
    with pytest.raises(RecipeError, match=r"layers.0.mlp is a LlamaMLP, which takes no adapter and wraps 3 layers"):
        find_targets(LlamaForCausalLM._from_config(config), LoraConfig(target_modules=["mlp"]))
