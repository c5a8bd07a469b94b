"""The plan is made from live modules and the names that the generator found."""

import pytest
import torch
from torch import nn

from patchgen.runtime.parallel import tables
from patchgen.runtime.parallel.report import describe
from patchgen.runtime.parallel.sharding import check_plan, expert_paths
from patchgen.runtime.parallel_plan import parallel_plan


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 6, 2))
        self.down_proj = nn.Parameter(torch.zeros(4, 2, 3))


def model():
    return nn.ModuleDict({"a": nn.ModuleDict({"experts": Experts()}), "b": nn.Linear(2, 2), "c": Experts()})


def test_every_live_experts_module_is_listed_with_its_path():
    plan = parallel_plan(model(), {"Experts": ("gate_up_proj", "down_proj")})
    assert plan.expert_parameters == (
        "a.experts.gate_up_proj",
        "a.experts.down_proj",
        "c.gate_up_proj",
        "c.down_proj",
    )
    assert set(plan.expert_parameters) <= set(dict(model().named_parameters()))
    assert "b.weight" not in plan


def test_a_parameter_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=r"names \['up_proj'\] on a.experts"):
        parallel_plan(model(), {"Experts": ("up_proj", "down_proj")})


def test_a_model_without_experts_has_an_empty_plan():
    assert parallel_plan(nn.Linear(2, 2), {}).expert_parameters == ()


def test_a_parameter_per_expert_that_the_plan_forgets_is_an_error():
    found = model()
    found["c"].scale = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"does not name \['scale'\] on c \(Experts\)"):
        parallel_plan(found, {"Experts": ("gate_up_proj", "down_proj")})
    found = model()
    found["c"].norm = nn.Parameter(torch.ones(3))  # not one per expert: replicated
    assert "c.norm" not in parallel_plan(found, {"Experts": ("gate_up_proj", "down_proj")})


def test_experts_that_no_rank_divides_are_named_with_the_reason():
    found = model()
    plan = parallel_plan(found, {}, left_alone={"Experts": "has tables", "Linear": "is plain", "Other": "is not here"})
    assert plan.left_alone == {"Experts": "has tables", "Linear": "is plain"}
    found.get_parallel_plan = lambda: plan
    with pytest.raises(ValueError, match=r"reports no expert parameters. .* Experts is left alone: has tables\."):
        check_plan(found, expert_paths(found), 2)
    assert "Experts left alone: has tables" in describe(found, None)


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


class LooksUpItself(nn.Embedding):
    def forward(self, input):
        return self.weight[input]


def test_tables_are_embeddings_that_only_nn_embedding_looks_up():
    """Of any size; the others are named with the reason."""
    found = nn.ModuleDict(
        {
            "plain": nn.Embedding(4, 2),
            "scaled": Scaled(4, 2),
            "tied": nn.Embedding(4, 2),
            "head": nn.Linear(2, 4, bias=False),
            "bounded": nn.Embedding(4, 2, max_norm=1.0),
            "by_frequency": nn.Embedding(4, 2, scale_grad_by_freq=True),
            "sparse": nn.Embedding(4, 2, sparse=True),
            "itself": LooksUpItself(4, 2),
        }
    )
    found["head"].weight = found["tied"].weight
    plan = parallel_plan(found, {})
    assert plan.tables == ("plain.weight", "scaled.weight")
    assert plan.tables_left_alone.keys() == {
        f"{name}.weight" for name in ("tied", "bounded", "by_frequency", "sparse", "itself")
    }
    assert "a head tied to it" in plan.tables_left_alone["tied.weight"]
    assert plan.tables_left_alone["itself.weight"].startswith("LooksUpItself looks rows up itself")


def test_the_n_gram_tables_of_qwen4_exp_are_row_sharded_by_default():
    """With upstream's own sizes, on the meta device: 51 billion parameters that no rank gathers, and nothing else."""
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    config = Qwen4ExpTextConfig(ple_layer_ids=[1], eos_token_id=5)
    with torch.device("meta"):
        layer = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0)
        model = nn.ModuleDict({"tokens": nn.Embedding(config.vocab_size, config.hidden_size), "layer": layer})
    names, gathered = tables.choose(model, tables.ABOVE)
    assert names == ["layer.ngram_embedding.weight"] and not gathered
    assert layer.ngram_embedding.weight.numel() > 4e10
    assert tables.choose(model, 1)[0] == ["tokens.weight", *names]
    assert tables.choose(model, None) == ([], {})
