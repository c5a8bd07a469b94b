"""Which parameters of a sharded model are computed in fp32 beside narrower ones, and how FSDP2 gathers them. On one rank of two, in
torch's fake group; tests/distributed has the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from patchgen.runtime.parallel import fp32_parameters, sharding, undivided
from patchgen.runtime.verify.slices import fake_rank

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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
    _no_split_modules = ("_Attention",)

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
    model = _Mixer()
    units, beside = fp32_parameters.find(model, BF16)
    assert units == [] and set(beside) == set(model.parameters())


@pytest.mark.parametrize(
    ("param_dtype", "stored"), [(BF16, FP32), (FP16, FP32), (None, BF16), (FP32, BF16), (None, FP32)]
)
def test_what_upstream_keeps_is_found(param_dtype, stored):
    """Strict names in bf16, all in fp16, none in fp32; with narrow shards also what is stored in fp32 beside them."""
    model = _Kept()
    for name, parameter in model.named_parameters():
        if name not in ("gate.weight", "attention.sinks"):
            parameter.data = parameter.data.to(stored)
    units, beside = fp32_parameters.find(model, param_dtype)
    nothing = param_dtype is None and stored == FP32
    assert units == ([] if nothing else [model.gate, model.norm] if param_dtype == FP16 else [model.gate])
    assert len(beside) == (0 if nothing else 1) and all(one is model.attention.sinks for one in beside)


def test_a_parameter_beside_others_is_a_group_of_its_own():
    """Stored and gathered in fp32, while the layer around it is bf16."""
    with fake_rank(sp=1) as state:
        model = sharding.shard_model(_Kept().to(BF16), state, options=sharding.ShardingOptions(param_dtype=BF16))
        narrow, wide = undivided.param_groups(model.attention)
        assert [param.sharded_param.shape for param in wide.fsdp_params] == [(2,)]
        assert model.attention.sinks.dtype == model.gate.weight.dtype == FP32
        assert model.attention.q_proj.weight.dtype == BF16
        assert (narrow.mp_policy.param_dtype, wide.mp_policy.param_dtype) == (BF16, FP32)
        assert wide.mesh_info is narrow.mesh_info


def test_a_torch_with_one_dtype_per_unit_stores_them_as_the_others(monkeypatch):
    """And says so: FSDP2 would refuse the unit."""
    monkeypatch.setattr(fp32_parameters, "IS_REBUILT", True)
    model = _Kept()
    for parameter in (model.attention.q_proj.weight, model.attention.q_proj.bias, *model.norm.parameters()):
        parameter.data = parameter.data.to(BF16)
    with pytest.warns(UserWarning, match=r"keeps \['attention.sinks'\] in fp32, in modules with other parameters"):
        units, beside = fp32_parameters.find(model, BF16)
    assert units == [model.gate] and beside == [] and model.attention.sinks.dtype == BF16
