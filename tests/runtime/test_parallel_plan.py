"""The plan is made from live modules and the names that the generator found."""

import pytest
import torch
from torch import nn

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
