"""What is refused before anything is sharded, and what is chosen: layers, cuts of experts, repeats of key heads, what stays in
fp32. No ranks needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from patchgen.runtime.parallel import ParallelConfig, sharding
from patchgen.runtime.parallel.sequence import key_value_repeats


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 4, 2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Experts(6)


class Model(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))


PATHS = [f"layers.{place}.mlp.gate_up_proj" for place in range(2)]


def test_a_plan_that_fits_is_accepted():
    sharding.check_plan(Model(), PATHS, 3)


def test_a_path_that_matches_nothing_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"names \['layers.0.mlp.w1'\], which Model does not have.*gate_up_proj"):
        sharding.check_plan(Model(), [*PATHS, "layers.0.mlp.w1"], 2)


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="gate_up_proj has 6 experts, which ep=4 does not divide evenly"):
        sharding.check_plan(Model(), PATHS, 4)


def test_a_parameter_beside_the_experts_own_is_refused():
    """A scale that all experts share would be trained from other tokens on each rank."""
    model = Model()
    model.layers[1].mlp.scale = nn.Parameter(torch.ones(2))
    with pytest.raises(
        ValueError, match=r"layers.1.mlp \(Experts\) has \['scale'\] in addition to its experts' parameters"
    ):
        sharding.check_plan(model, PATHS, 2)


def test_a_norm_that_all_experts_share_is_no_expert():
    """Every rank has gradients of it, from the tokens of its experts: it is sharded as dense parameters are."""
    model = Model()
    for layer in model.layers:
        layer.mlp.norm, layer.mlp.activation = nn.RMSNorm(2), nn.SiLU()
    sharding.check_plan(model, PATHS, 2)
    experts = [layer.mlp for layer in model.layers]
    assert sharding.shared_by_experts(experts) == [one.norm for one in experts]


def test_expert_parallelism_without_experts_is_refused():
    with pytest.raises(ValueError, match="ep=2, but Model reports no expert parameters"):
        sharding.check_plan(Model(), [], 2)


def test_layers_are_the_classes_that_are_not_split_or_what_is_kept_in_lists():
    model = Model()
    assert sharding.find_layers(model, None) == list(model.layers)
    model._no_split_modules = None
    assert sharding.find_layers(model, None) == list(model.layers)
    assert sharding.find_layers(model, ["Experts"]) == [layer.mlp for layer in model.layers]
    with pytest.raises(ValueError, match=r"no modules of the classes \['Block'\]"):
        sharding.find_layers(model, ["Block"])


@pytest.mark.parametrize(
    ("shape", "ep_shard", "dim"),
    [((8, 6, 4), 4, 0), ((4, 8, 4), 4, 0), ((2, 6, 4), 4, 2), ((2, 8, 4), 4, 1), ((2, 6, 3), 4, 0)],
)
def test_fsdp_cuts_between_experts_or_inside_them(shape, ep_shard, dim):
    """With fewer experts on a rank than shards, between them would leave ranks without any part."""
    state = SimpleNamespace(config=ParallelConfig(dp_shard=ep_shard))
    assert sharding.expert_placement(nn.Parameter(torch.zeros(shape)), state) == Shard(dim)


@pytest.mark.parametrize(
    ("query", "key", "size", "repeats"),
    [(8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 4, 4), (12, 6, 4, 2), (24, 6, 4, 2), (32, 4, 8, 2)],
)
def test_key_heads_are_repeated_no_more_than_needed(query, key, size, repeats):
    assert key_value_repeats(query, key, size, where="Attention") == repeats


def test_query_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="Attention has 6 query heads, which sp=4 does not divide"):
        key_value_repeats(6, 2, 4, where="Attention")


class _Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(2))
        self.q_proj = nn.Linear(2, 2)


class _Kept(nn.Module):
    _keep_in_fp32_modules_strict = ("gate.weight", "sinks")
    _keep_in_fp32_modules = ("norm",)

    def __init__(self):
        super().__init__()
        self.gate, self.attention, self.norm = _Gate(), _Attention(), nn.LayerNorm(2)


class _Mixer(nn.Module):
    _keep_in_fp32_modules_strict = ("conv1d",)

    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(2, 2, 3, groups=2)

    def forward(self, x):
        return nn.functional.conv1d(x, self.conv1d.weight, groups=2)


def test_a_module_that_is_read_and_never_called_is_no_unit():
    """FSDP2 gathers a unit when it is called: `self.conv1d.weight` would be a shard."""
    with pytest.warns(UserWarning, match=r"'conv1d.weight'.*read without being called"):
        assert sharding.kept_in_fp32(_Mixer(), torch.bfloat16) == []


def test_modules_that_upstream_keeps_in_fp32():
    """Strict names hold in bf16, all in fp16; a parameter in a module of two dtypes is named in a warning."""
    model = _Kept()
    assert sharding.kept_in_fp32(model, None) == sharding.kept_in_fp32(model, torch.float32) == []
    with pytest.warns(UserWarning, match=r"keeps \['attention.sinks'\] in fp32.*torch.bfloat16"):
        assert sharding.kept_in_fp32(model, torch.bfloat16) == [model.gate]
    with pytest.warns(UserWarning, match=r"attention.sinks"):
        assert sharding.kept_in_fp32(model, torch.float16) == [model.gate, model.norm]
