"""`train.router_balance`: when the router loss is switched on, what is refused before ranks start, and how a bias is moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_recipe import SMALL, recipe_of

from patchgen.runtime.train import checks, preflight, router_balance, run_plan
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import ModelConfig, Recipe, RecipeError
from patchgen.runtime.train.sections import RouterBiasConfig
from patchgen.runtime.verify.small_config import small_config

DEEPSEEK = {
    **{key: value for key, value in SMALL.items() if not key.startswith(("num_experts", "head_dim", "num_key"))},
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip


def deepseek(**sections: dict) -> Recipe:
    return recipe_of(
        **sections | {"model": {"source": "deepseek_v3", "overrides": DEEPSEEK} | sections.get("model", {})}
    )


def test_experts_from_random_weights_get_the_router_loss_and_it_is_said():
    recipe = router_balance.decided(recipe_of())
    assert recipe.train.router_balance == "loss" and recipe.model.overrides == SMALL
    assert router_balance.decided(recipe) == recipe
    model = models.build_on_meta(recipe)
    assert not model.config.output_router_logits, "of the run: exports would compute the loss while they generate"
    assert router_balance.forward_options(recipe) == {"output_router_logits": True}
    assert router_balance.as_proven(recipe).model.overrides == SMALL | {"output_router_logits": True}
    line = "the router loss, coefficient 0.001, since the experts start from random weights (train.router_balance: none declines)"
    assert router_balance.summary(recipe, model) == line
    assert f"balance      {line}\n" in run_plan.describe(recipe, model, 1)


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"router_balance": "none"}},
        {"model": {"overrides": SMALL | {"output_router_logits": False}}},
        {"model": {"overrides": SMALL | {"output_router_logits": True}}},
        {"lora": {}},
        {"objective": {"name": "classification", "options": {"num_labels": 2}}},
        {"model": {"source": "qwen3", "overrides": {}}},
    ],
    ids=["declined", "said off", "said on", "adapters", "a head without it", "no experts"],
)
def test_else_a_recipe_stays_as_it_is(sections):
    recipe = recipe_of(**sections)
    assert router_balance.decided(recipe) == recipe


def test_weights_that_are_there_are_trained_as_their_config_says(tmp_path):
    (tmp_path / "model.safetensors").touch()
    small_config("qwen3_moe").config.save_pretrained(tmp_path)
    recipe = recipe_of(model={"source": str(tmp_path), "overrides": {}})
    assert router_balance.decided(recipe) == recipe
    asked = replace(recipe, train=replace(recipe.train, router_balance="loss"))
    assert router_balance.decided(asked) == asked, "its coefficient is not 0"


def test_the_fields_are_those_of_the_text_config_and_other_overrides_stay():
    text = {"num_hidden_layers": 2, "router_aux_loss_coef": 0.0}
    recipe = router_balance.decided(recipe_of(model={"source": "qwen3_vl_moe", "overrides": {"text_config": text}}))
    assert recipe.model.overrides == {"text_config": text | {"router_aux_loss_coef": 0.01}}
    proven = router_balance.as_proven(recipe).model.overrides
    assert proven == {"text_config": text | {"router_aux_loss_coef": 0.01, "output_router_logits": True}}


def test_the_decision_is_part_of_what_is_proven_before_ranks_start(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    examined = []

    def examine(recipe: Recipe):
        examined.append(recipe)
        raise RecipeError("enough")

    monkeypatch.setattr(preflight, "examine", examine)
    with pytest.raises(RecipeError, match="enough"):
        preflight.decide_trainable(recipe_of())
    assert examined[0].train.router_balance == "loss" and examined[0].model.overrides["output_router_logits"]


def test_a_loss_that_a_model_does_not_have_is_refused():
    with pytest.raises(
        RecipeError, match=r"DeepseekV3ForCausalLM .*adds no router loss.*set train\.router_balance: bias"
    ):
        router_balance.decided(deepseek(train={"router_balance": "loss"}))


def test_a_bias_that_a_model_does_not_have_is_refused_with_what_there_is():
    with pytest.raises(RecipeError, match=r"Qwen3MoeForCausalLM has none\..*set train\.router_balance: loss") as error:
        checks.build_runnable(recipe_of(train={"router_balance": "bias"}), world=1)
    assert "upstream's model, for which the export is made, would choose other experts without it" in str(error.value)


def test_a_bias_in_16_bits_is_refused():
    """DeepSeek-V3 keeps it in fp32 in a model in bf16, MiniMax-M2 does not."""
    wide = deepseek(train={"router_balance": "bias"}, model={"dtype": "bfloat16"})
    router_balance.require_possible(wide, models.build_on_meta(wide))
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_local_experts": 8, "vocab_size": 320}
    model = ModelConfig(source="minimax_m2", overrides=small, dtype="bfloat16")
    narrow = replace(wide, model=model)
    with pytest.raises(RecipeError, match=r"layers\.0\.mlp\.e_score_correction_bias in float32.*torch\.bfloat16"):
        router_balance.require_possible(narrow, models.build_on_meta(narrow))


def test_what_is_moved_or_could_be_is_said():
    recipe = deepseek(train={"router_balance": "bias", "router_bias": {"rate": 0.01}})
    model = models.build_on_meta(recipe)
    assert router_balance.summary(recipe, model) == (
        "a bias per expert, moved after each step by 0.01: model.layers.1.mlp.gate.e_score_correction_bias and 1 more"
    )
    open_recipe = router_balance.decided(deepseek())
    assert open_recipe.train.router_balance is None
    assert router_balance.summary(open_recipe, model).endswith("random weights; train.router_balance: bias would")


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({}, [-0.001, 0.001, 0.0, 0.001]),
        ({"by": "size", "rate": 0.1}, [-0.1, 0.05, 0.0, 0.05]),
        ({"rate": 0.4, "warmup_steps": 4}, [-0.1, 0.1, 0.0, 0.1]),
        ({"rate": 0.4, "bound": 0.25}, [-0.25, 0.25, 0.0, 0.25]),
    ],
    ids=lambda value: " ".join(value) or "default" if isinstance(value, dict) else "",
)
def test_a_step_moves_each_bias_against_the_error_of_its_load(options, moves):
    """Loads of 16, 4, 8 and 4: the mean is 8."""
    model = _with_values(deepseek(model={"overrides": DEEPSEEK | {"n_routed_experts": 4, "num_hidden_layers": 2}}))
    biases = router_balance.SelectionBiases(model, RouterBiasConfig(**options))
    index = torch.repeat_interleave(torch.arange(4), torch.tensor([16, 4, 8, 4])).view(-1, 2)
    experts, weights = model.model.layers[1].mlp.experts, torch.ones(16, 2)
    (bias,) = biases.biases.values()
    experts(torch.ones(16, 32), index, weights)
    biases.after_step(1, was_taken=torch.tensor(False))
    assert not bias.any(), "a skipped step moves nothing"
    experts(torch.ones(16, 32), index, weights)
    biases.after_step(1, was_taken=torch.tensor(True))
    assert bias.tolist() == pytest.approx(moves)
    loads = biases.read_on_device()
    assert loads["model.layers.1.mlp.experts"].tolist() == [32, 8, 16, 8], "for the log, of both steps"
    assert biases.read_on_device() == {}
    biases.after_step(2)
    assert bias.tolist() == pytest.approx(moves), "no loads, no error"


def _with_values(recipe: Recipe):
    """A recipe's model on the CPU, its weights zero."""
    model = models.build_on_meta(recipe).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return model
