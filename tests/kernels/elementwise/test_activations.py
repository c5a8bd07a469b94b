"""Which formula a model's gate computes, found by running it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from moe_cases import ClampedSwiglu, ReluSquared
from rounding import require_equal_up_to_rounding
from torch import nn
from transformers import activations as upstream
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from patchgen.kernels.elementwise.activations import Activation, recognise


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
        ("relu", "relu"),
        ("relu2", "relu2"),
    ],
)
@pytest.mark.parametrize("is_gated", [True, False])
def test_activations_of_transformers_are_recognised(name: str, kind: str, is_gated: bool):
    found = recognise(upstream.ACT2FN[name], None, is_gated=is_gated, is_interleaved=False)
    assert found == Activation(kind=kind, is_gated=is_gated)


@pytest.mark.parametrize("name", ["mish", "relu6", "sigmoid", "tanh", "leaky_relu", "gelu_10", "linear", "xielu"])
def test_other_activations_are_unknown(name: str):
    assert recognise(upstream.ACT2FN[name], None, is_gated=True, is_interleaved=False) is None


def test_quick_gelu_is_silu_with_a_slope():
    found = recognise(upstream.ACT2FN["quick_gelu"], None, is_gated=True, is_interleaved=False)
    assert found == Activation(alpha=1.702)


@pytest.mark.parametrize(
    ("experts", "is_interleaved", "expected"),
    [
        (GptOssExperts, True, Activation(alpha=1.702, limit=7.0, up_shift=1.0)),
        (DeepseekV4Experts, False, Activation(limit=7.0)),
        (Step3p7Experts, False, Activation(limit=7.0, limit_after=True)),
    ],
)
def test_gate_methods_of_upstream_experts_are_recognised(experts: type, is_interleaved: bool, expected: Activation):
    owner = _owner(experts)
    assert recognise(owner.act_fn, owner._apply_gate, is_gated=True, is_interleaved=is_interleaved) == expected


def _owner(experts: type) -> nn.Module:
    """A module with the method and the numbers of the experts class, and none of its weights."""
    owner = type("Owner", (nn.Module,), {"_apply_gate": experts._apply_gate})()
    owner.act_fn, owner.alpha, owner.limit = nn.SiLU(), 1.702, 7.0
    return owner


def test_a_gate_read_with_the_wrong_layout_is_unknown():
    assert recognise(None, ClampedSwiglu(is_interleaved=True), is_gated=True, is_interleaved=False) is None


def test_a_learned_or_normalising_gate_is_unknown():
    assert recognise(nn.PReLU(), None, is_gated=True, is_interleaved=False) is None
    softmax = SimpleNamespace(gate=lambda x: x.chunk(2, dim=-1)[0].softmax(-1))
    assert recognise(None, softmax.gate, is_gated=True, is_interleaved=False) is None


def test_the_formula_equals_the_function_it_was_found_from():
    gate, up = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)).unbind(0)
    gate, up = gate * 4, up * 4
    for is_interleaved in (False, True):
        function = ClampedSwiglu(is_interleaved)
        pairs = torch.stack((gate, up), -1).flatten(-2) if is_interleaved else torch.cat((gate, up), -1)
        found = recognise(None, function, is_gated=True, is_interleaved=is_interleaved)
        require_equal_up_to_rounding(found.gate(gate, up), function(pairs))
        assert not math.isinf(found.limit)
    squared = recognise(ReluSquared(), None, is_gated=True, is_interleaved=False)
    assert torch.equal(squared.gate(gate, up), torch.relu(gate).square() * up)


class LearnedGate(torch.nn.Module):
    def __init__(self, alpha: torch.Tensor):
        super().__init__()
        self.alpha = alpha

    def gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate * self.alpha) * up


def test_a_gate_that_reads_a_learned_number_is_none_of_the_known_formulas():
    """Folded into a constant it would neither move nor get a gradient."""
    learned = LearnedGate(torch.nn.Parameter(torch.tensor(1.702)))
    assert recognise(None, learned.gate, True, False) is None
    fixed = recognise(None, LearnedGate(torch.tensor(1.702)).gate, True, False)
    assert fixed is not None and fixed.alpha == pytest.approx(1.702)
