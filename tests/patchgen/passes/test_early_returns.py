"""A return above the loss is passed over only where training does not reach it: else the seam would compute a loss there."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.errors import PassMismatch
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


@pytest.mark.parametrize(
    "branch",
    [
        "if input_ids is None:\n    return hidden_states",
        "match input_ids:\n    case None:\n        return hidden_states",
        "if labels is not None:\n    return hidden_states",
        "if labels is None:\n    input_ids = input_ids * 2\nelse:\n    return hidden_states",
        "if not self.training:\n    hidden_states = hidden_states * 2\nelif input_ids is None:\n    return hidden_states",
        "with torch.no_grad():\n    return hidden_states",
    ],
)
def test_a_return_that_training_reaches_is_a_miss(branch: str):
    with pytest.raises(PassMismatch, match="no return in training above the loss"):
        applied(FusedLoss(), head(branch))
