"""Groups, schedules, freezing, and Muon beside AdamW, on plain models."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from patchgen.runtime import registry
from patchgen.runtime.train import optimizers
from patchgen.runtime.train.muon import Muon
from patchgen.runtime.train.recipe import OptimConfig, RecipeError
from patchgen.runtime.train.sections import ParameterGroupConfig


@pytest.fixture
def model():
    from transformers import Qwen3MoeConfig

    torch.manual_seed(0)
    return registry.build_model(
        Qwen3MoeConfig(
            vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


def names_in(model, group) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


def test_the_first_group_that_matches_counts_and_vectors_do_not_decay(model):
    groups = (
        ParameterGroupConfig(pattern="*.mlp.experts.*", lr=1e-4),
        ParameterGroupConfig(pattern="model.layers.*", weight_decay=0.5),
    )
    found = optimizers.build(model, OptimConfig(lr=1e-3, weight_decay=0.1, groups=groups)).param_groups
    settings = {name: (group["lr"], group["weight_decay"]) for group in found for name in names_in(model, group)}
    assert len(settings) == len(list(model.parameters()))
    assert settings["model.layers.0.mlp.experts.gate_up_proj"] == (1e-4, 0.1)
    assert settings["model.layers.0.self_attn.q_proj.weight"] == (1e-3, 0.5)
    assert settings["model.layers.0.input_layernorm.weight"] == (1e-3, 0.0)
    assert settings["lm_head.weight"] == (1e-3, 0.1)


def test_patterns_that_match_or_change_nothing_are_refused(model):
    with pytest.raises(RecipeError, match="'model.visual.\\*' matches no trainable parameter. There are"):
        optimizers.build(model, OptimConfig(groups=(ParameterGroupConfig(pattern="model.visual.*"),)))
    everything = ParameterGroupConfig(pattern="*", lr=1e-4)
    with pytest.raises(RecipeError, match="earlier groups have all 2 parameters that '\\*experts\\*' matches"):
        optimizers.build(model, OptimConfig(groups=(everything, ParameterGroupConfig(pattern="*experts*", lr=1e-5))))
    norms = ParameterGroupConfig(pattern="*norm.weight", weight_decay=0.5)
    with pytest.raises(RecipeError, match="has weight_decay = 0.5, and its parameters are biases or norms"):
        optimizers.build(model, OptimConfig(groups=(norms,)))
    optimizers.build(model, OptimConfig(groups=(norms,), decay_vectors=True))
    with pytest.raises(RecipeError, match="matches no parameter"):
        optimizers.freeze(model, ["model.visual.*"])
    with pytest.raises(RecipeError, match="leaves nothing to train"):
        optimizers.freeze(model, ["*"])


def test_frozen_parameters_are_in_no_group(model):
    frozen = optimizers.freeze(model, ["*.gate.weight", "model.embed_tokens.*"])
    assert frozen == ["model.layers.0.mlp.gate.weight", "model.embed_tokens.weight"]
    groups = optimizers.build(model, OptimConfig()).param_groups
    assert not set(frozen) & set().union(*(names_in(model, group) for group in groups))


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(model):
    optimizer = optimizers.build(model, OptimConfig(name="muon", lr=1e-3, muon_lr=1e-2))
    muon, adamw = optimizer.parts
    assert isinstance(muon, Muon)
    of_muon = set().union(*(names_in(model, group) for group in muon.param_groups))
    assert "model.layers.0.self_attn.q_proj.weight" in of_muon
    assert "model.layers.0.mlp.experts.down_proj" in of_muon
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & of_muon
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    assert count == len(list(model.parameters()))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ids = torch.randint(0, 32, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizers.set_learning_rate(optimizer, 0.5)
    assert {group["lr"] for group in muon.param_groups} == {5e-3}
    assert {group["lr"] for group in adamw.param_groups} == {5e-4}
    optimizer.step()
    assert all(bool((parameter != before[name]).any()) for name, parameter in model.named_parameters())
    assert {"momentum_buffer"} == set(optimizer.state[model.model.layers[0].self_attn.q_proj.weight])
    assert {"step", "exp_avg", "exp_avg_sq"} == set(optimizer.state[model.lm_head.weight])


@settings(suppress_health_check=[HealthCheck.too_slow])  # a machine that does other things, too
@given(
    schedule=some.sampled_from(["constant", "linear", "cosine", "wsd"]),
    total=some.integers(1, 500),
    shares=some.tuples(some.floats(0, 0.5), some.floats(0, 0.5)),
    low=some.floats(0, 1),
)
def test_schedules_stay_between_their_ends(schedule, total, shares, low):
    warmup, decay = int(total * shares[0]), int(total * shares[1]) if schedule == "wsd" else 0
    config = OptimConfig(schedule=schedule, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=low)
    found = [optimizers.lr_factor(step, config, total) for step in range(total)]
    assert all(0 < share <= 1 + 1e-12 or low == 0 for share in found)
    rising, falling = found[:warmup], found[warmup:]
    assert rising == sorted(rising)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))
    assert not falling or falling[0] == pytest.approx(1.0) or decay >= total - warmup
    assert all(share >= low - 1e-12 for share in falling)


def test_cosine_agrees_with_torchs_own():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.1)
    config = OptimConfig(schedule="cosine", min_lr_ratio=0.1)
    for step in range(50):
        assert optimizers.lr_factor(step, config, 50) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
