"""A return above the loss that training does not reach leaves the loss its seam."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.passes.fused_loss import FusedLoss

HEAD = FusedLoss.EXAMPLES[0].before.partition("class ExampleCapped")[0]
ABOVE = "        logits = self.lm_head(hidden_states)\n"


def head(branch: str) -> str:
    assert HEAD.count(ABOVE) == 1
    return HEAD.replace(ABOVE, "".join(f"        {line}\n" for line in branch.splitlines()) + ABOVE)


@pytest.mark.parametrize(
    "branch",
    [
        "if not self.training:\n    return hidden_states",
        "if labels is None:\n    return hidden_states",
        "if labels is None:\n    return hidden_states\nelse:\n    hidden_states = hidden_states * 2",
    ],
)
def test_a_return_without_labels_or_training_is_passed_over(branch: str):
    assert "ops.causal_lm_loss(" in applied(FusedLoss(), head(branch)).module.text
