"""The product of a gated MLP is looked for in what its forward runs once, and always."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.errors import PassMismatch
from patchgen.passes.fused_ops import FusedOps

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
