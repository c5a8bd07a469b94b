"""What `train.precision: fp8` chooses in models on the meta device, and what it refuses before ranks start."""

from __future__ import annotations

import pytest
import torch
from small_recipe import recipe_of
from torch import nn

from patchgen.kernels.linear.fp8_linear import Fp8Linear
from patchgen.runtime.train import checks, model, precision, run_plan
from patchgen.runtime.train.recipe import RecipeError, from_dict

WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
FP8 = {"train": {"precision": "fp8"}}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def fp8_recipe(overrides: dict | None = None, **train: object):
    base = recipe_of()
    overrides = {**base.model.overrides, **WIDE, **(overrides or {})}
    return recipe_of(model={"overrides": overrides}, train={"precision": "fp8", **train})


def paths(recipe) -> list[str]:
    return [*precision.layers_of(model.build_on_meta(recipe), recipe)]


def test_layers_of_attention_and_dense_mlps_are_chosen_and_no_router_or_head():
    """The last layer of this model is dense, the others are experts with a router."""
    dense = {"mlp_only_layers": [2]}
    found = paths(fp8_recipe(dense))
    expected = [f"model.layers.{layer}.self_attn.{name}" for layer in range(3) for name in PROJECTIONS]
    assert sorted(found) == sorted(expected + [f"model.layers.2.mlp.{name}_proj" for name in ("gate", "up", "down")])


def test_both_factors_of_latent_attention_and_shared_experts_are_chosen():
    sizes = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    }  # fmt: skip
    recipe = from_dict(
        {"model": {"source": "deepseek_v3", "overrides": sizes}, "data": {"tokens_per_batch": 64}, **FP8}
    )
    names = {path.partition("layers.1.")[2] for path in paths(recipe)} - {""}
    attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    shared = {f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
    assert names == {f"self_attn.{name}" for name in attention} | shared


def test_sizes_that_fp8_does_not_take_stay_as_they_are():
    """Keys and values of one head of 8."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
    assert {path.rpartition(".")[2] for path in paths(fp8_recipe(sizes))} == {"q_proj", "o_proj"}


def test_two_layers_of_one_square_size_lead_back_and_one_does_not():
    class Mlp(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            for index in range(count):
                setattr(self, f"fc{index}", nn.Linear(32, 32))
            self.gate = nn.Linear(32, 64)

    assert [*precision.find(nn.Sequential(Mlp(1), Mlp(2)))] == ["1.fc0", "1.fc1"]


def test_excluded_layers_stay_as_they_are_and_a_pattern_without_one_is_refused():
    excluded = {"exclude": ["model.layers.0.*", "*.k_proj"]}
    found = paths(fp8_recipe(fp8=excluded))
    assert found == [
        f"model.layers.{layer}.self_attn.{name}" for layer in (1, 2) for name in ("q_proj", "v_proj", "o_proj")
    ]
    with pytest.raises(
        RecipeError, match=r"train.fp8.exclude: 'lm_head' matches no linear layer .* model.layers.0.self_attn"
    ):
        paths(fp8_recipe(fp8={"exclude": ["lm_head"]}))


def test_options_of_fp8_without_it_are_refused():
    with pytest.raises(RecipeError, match="train.fp8 is set, but train.precision is not fp8"):
        recipe_of(train={"fp8": {"weight_gradients": "fp8"}})


def test_a_converted_model_has_the_same_parameters_and_names():
    recipe = fp8_recipe(fp8={"weight_gradients": "fp8"})
    plain, converted = model.build_on_meta(recipe), model.build_on_meta(recipe)
    precision.convert(converted, recipe)
    for kind in ("named_parameters", "named_buffers"):
        first, second = ([(n, t.shape, t.dtype) for n, t in getattr(one, kind)()] for one in (plain, converted))
        assert first == second
    assert [*plain.state_dict()] == [*converted.state_dict()]
    layers = [one for one in converted.modules() if isinstance(one, Fp8Linear)]
    assert len(layers) == 12 and all(one.has_narrow_gradient for one in layers)
    assert not any(isinstance(one, Fp8Linear) for one in plain.modules())
    with precision.exact(converted):
        assert all(one.is_exact for one in layers)
    assert not any(one.is_exact for one in layers)


def test_a_dry_run_says_what_computes_in_fp8():
    recipe = fp8_recipe()
    text = run_plan.describe(recipe, checks.build_runnable(recipe, 1), 1)
    expected = "fp8: 3 q_proj, 3 k_proj, 3 v_proj, 3 o_proj; gradients of their weights in bfloat16"
    assert f"precision    {expected}" in text
    plain = recipe_of()
    assert "precision" not in run_plan.describe(plain, checks.build_runnable(plain, 1), 1)


def test_a_gpu_without_fp8_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(RecipeError, match="fp8 cannot run here: NVIDIA A100-SXM4-80GB has compute capability 8.0"):
        precision.require_available(fp8_recipe(), torch.bfloat16)
    precision.require_available(recipe_of(), torch.bfloat16)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    precision.require_available(fp8_recipe(), torch.bfloat16)
    with pytest.raises(RecipeError, match="layers in float32: products in FP8 return bfloat16"):
        precision.require_available(fp8_recipe(), torch.float32)


def test_adapters_are_refused():
    values = {"model": {"overrides": {**recipe_of().model.overrides, **WIDE}}, "lora": {}}
    with pytest.raises(RecipeError, match="lora trains adapters"):
        run_plan.require_valid(recipe_of(**values, train={"precision": "fp8"}), 1)


def test_experts_are_in_fp8_on_a_gpu_unless_the_recipe_names_others(monkeypatch):
    named = recipe_of(**FP8, kernels={"fused_moe": "triton"})
    assert precision.experts_kernel(recipe_of(**FP8)) is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert precision.experts_kernel(recipe_of(**FP8)) == "fp8"
    assert precision.experts_kernel(named) == "triton"
    assert precision.experts_kernel(recipe_of()) is None
