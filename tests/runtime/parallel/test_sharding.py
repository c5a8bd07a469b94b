"""What is refused before anything is sharded, and what is chosen: layers, cuts of experts, repeats of key heads. No ranks
needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from recorded_facts import OF_LENGTH, OF_STATE, recorded
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from patchgen.runtime.parallel import ParallelConfig, sharding
from patchgen.runtime.parallel.sequence import key_value_repeats
from patchgen.runtime.verify.slices import fake_rank


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


# ----------------------------------------------------------------------------------- layouts that a proof rules out


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_trainer_that_shards_parameters_itself_asks_for_the_layout(tmp_path):
    kind = recorded(tmp_path / "slices", [OF_LENGTH])
    with pytest.raises(ValueError, match=r"^Model: line 7, `scale = log\(n\)`: .* it trains with sp=1, not with sp=2"):
        sharding.require_layout(kind, ranks=2, sp=2)
    sharding.require_layout(kind, ranks=2, sp=1)


@pytest.mark.parametrize(
    ("fact", "sp", "told"),
    [
        (OF_STATE, 1, "line 9, `self.seen = x`: .* it trains on one rank, not on 2"),
        (OF_LENGTH, 2, "line 7, .* it trains with sp=1, not with sp=2"),
    ],
)
def test_nothing_is_sharded_on_ranks_that_the_proof_rules_out(tmp_path, fact, sp, told):
    model = recorded(tmp_path / "model", [fact])()
    with fake_rank(sp) as state:
        with pytest.raises(ValueError, match=told):
            sharding.shard_model(model, state)
        assert not is_sharded(model)
        sharding.shard_model(model, state, obeys_proof=False)  # a proof on ranks finds out
        assert is_sharded(model)


def test_whole_sequences_are_sharded_where_only_slices_are_ruled_out(tmp_path):
    model = recorded(tmp_path / "model", [OF_LENGTH])()
    with fake_rank(sp=1) as state:
        sharding.shard_model(model, state)
    assert is_sharded(model)
