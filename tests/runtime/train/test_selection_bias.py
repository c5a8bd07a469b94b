"""Biases for selection alone are found by what they do, whatever they are called and wherever they are."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from patchgen.runtime.train import model as models
from patchgen.runtime.train import selection_bias
from patchgen.runtime.train.recipe import from_dict
from patchgen.runtime.verify.small_config import small_config

BIAS = "e_score_correction_bias"


def built(model_type: str):
    """A small model of a committed type on the meta device."""
    head, config = models.find_head_and_config(CONFIG_MAPPING[model_type]())
    with torch.device("meta"):
        return head._from_config(small_config(type(config)).config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("model_type", "place", "layers"),
    [
        ("deepseek_v3", "model.layers.{}.mlp.gate", (1, 2, 3)),
        ("deepseek_v4", "model.layers.{}.mlp.gate", (1, 2)),  # layer 0 looks its experts up by token
        ("ernie4_5_moe", "model.layers.{}.mlp.gate.moe_statics", (1, 2, 3)),  # a parameter
        ("glm4_moe", "model.layers.{}.mlp.gate", (1, 2, 3)),
        ("glm4v_moe", "model.language_model.layers.{}.mlp.gate", (1, 2, 3)),
        ("glm_moe_dsa", "model.layers.{}.mlp.gate", (1, 2, 3)),
        ("minimax_m2", "model.layers.{}.mlp", (0, 1)),  # of the block around the router
        ("nemotron_h", "model.layers.{}.mixer.gate", (1,)),
    ],
)
def test_the_biases_of_committed_models_are_found(model_type, place, layers):
    found = selection_bias.find(built(model_type))
    assert [*found.values()] == [f"{place.format(layer)}.{BIAS}" for layer in layers]
    assert all(path.endswith(".experts") for path in found)


def test_the_bias_of_a_model_with_a_new_head_is_found():
    """A classifier has no rule for the last token of several rows without a padding token."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "n_routed_experts": 8, "first_k_dense_replace": 1}
    model = {"source": "deepseek_v3", "overrides": {**sizes, "n_group": 1, "topk_group": 1}}
    classifier = {"name": "classification", "options": {"num_labels": 2}}
    built_model = models.build_on_meta(from_dict({"model": model, "data": {}, "objective": classifier}))
    assert [*selection_bias.find(built_model).values()] == [f"model.layers.1.mlp.gate.{BIAS}"]


def test_a_bias_that_also_weighs_the_chosen_experts_is_none():
    """gpt_oss adds it to the logits; frozen, as by `model.freeze`, it is a candidate."""
    model = built("gpt_oss").requires_grad_(False)
    assert selection_bias.find(model) == {}
    small = selection_bias.small_model(type(model), model.config)
    small.requires_grad_(False)
    assert [name for name, _ in selection_bias.candidates(small, "model.layers.0.mlp.experts")] == ["router.bias"]
    assert selection_bias.in_small_model(small) == []


def test_trials_leave_weights_and_random_numbers_as_they_were():
    model = built("deepseek_v3")
    before = torch.random.get_rng_state()
    selection_bias.find(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    small = selection_bias.small_model(type(model), model.config)
    weights = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    assert len(selection_bias.in_small_model(small)) == 3
    assert all(torch.equal(weights[name], tensor) for name, tensor in small.state_dict().items())
