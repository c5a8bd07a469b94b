"""The product of a gated MLP is looked for in what its forward runs once, and always."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.errors import PassMismatch
from patchgen.passes.fused_ops import FusedOps

NORM = FusedOps.EXAMPLES[0].before
BEFORE = FusedOps.EXAMPLES[1].before
PRODUCT = "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"


@pytest.mark.parametrize(
    "header",
    ["for _ in range(2):", "if x is None:\n            pass\n        elif x.any():\n            pass\n        else:"],
)
def test_a_product_that_does_not_always_run_is_missed(header):
    assert PRODUCT in BEFORE
    with pytest.raises(PassMismatch, match="in one statement"):
        applied(FusedOps(), BEFORE.replace(PRODUCT, f"{header}\n            {PRODUCT}\n        return x"))


@pytest.mark.parametrize(
    "header",
    ["if x is None:\n            pass\n        else:\n            ", "if x is None:\n            pass\n        "],
)
def test_a_product_beside_a_branch_is_found(header):
    assert "ops.swiglu(" in applied(FusedOps(), BEFORE.replace(PRODUCT, f"{header}{PRODUCT}")).module.text


def test_a_gate_around_a_norm_and_a_gated_mlp_of_another_formula_are_named():
    gate = """
class ExampleGate(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = ExampleRMSNorm(size)
        self.proj = nn.Linear(size, size)

    def forward(self, x):
        return self.norm(x) * torch.sigmoid(self.proj(x))


class ExampleMixer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gate = ExampleGate(size)
        self.proj = nn.Linear(size, size)

    def forward(self, x):
        return self.gate(x) * torch.sigmoid(self.proj(x))


class ExampleGatedMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(8, 16)
        self.up_proj = nn.Linear(8, 16)
        self.down_proj = nn.Linear(16, 8)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7) * self.up_proj(x).clamp(max=7))
"""
    assert applied(FusedOps(), NORM + gate).notes == (
        "ExampleGate: a gate around a norm, left as it is; only the norm is a seam",
        "ExampleGatedMLP: a gated MLP of another formula, left as it is",
    )
