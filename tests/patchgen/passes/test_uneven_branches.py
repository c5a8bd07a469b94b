"""Ranks agree on a branch only where a rank without such tokens computes what it did before, and waits for nobody."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.passes.uneven_branches import UnevenBranches

BLOCK = """
class ExampleMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.text_moe = ExampleSparseMoe(config)
        self.vision_moe = ExampleSparseMoe(config)

    def forward(self, hidden_states, is_vision=None):
        if is_vision is not None and is_vision.any():
            out = torch.zeros_like(hidden_states)
            is_vision = is_vision.bool()
            columns = is_vision[..., None].expand(-1, -1, 4)
            out[columns] = self.vision_moe(hidden_states[columns])
            out[~is_vision] = self.text_moe(hidden_states[~is_vision])
        else:
            out = self.text_moe(hidden_states)
        return out
"""
LAST = "out[~is_vision] = self.text_moe(hidden_states[~is_vision])"
TEST = "if is_vision is not None and is_vision.any():"


def test_the_test_of_another_method_stays():
    other = f"    def count(self, is_vision=None):\n        {TEST}\n            return 1\n        return 0\n\n"
    outcome = applied(UnevenBranches(), BLOCK.replace("    def forward", other + "    def forward"))
    above, _, forward = outcome.module.text.partition("def forward")
    assert TEST in above and "ops.tokens_of_any_rank(is_vision, hidden_states)" in forward


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (TEST, f"if hidden_states is None:\n            return None\n        {TEST}"),
        (
            "out[columns] = self.vision_moe(hidden_states[columns])",
            "out[columns] = self.vision_moe(hidden_states).sum()",
        ),
        ("self.vision_moe(hidden_states[columns])", "self.vision_moe(hidden_states)"),
        ("self.vision_moe(hidden_states[columns])", "self.vision_moe(hidden_states[columns], scale=2)"),
        ("out[columns] =", "out ="),
        ("out[columns] =", "out[~columns] ="),
        ("is_vision.bool()", "is_vision.bool().roll(1)"),
        ("out = self.text_moe(hidden_states)", "out = self.vision_moe(hidden_states)"),
        ("out = self.text_moe(hidden_states)", "out = self.text_moe(hidden_states * 2)"),
        ("out = self.text_moe(hidden_states)", "out = hidden_states"),
        (TEST, f"states = hidden_states * 2\n        {TEST}"),
        (TEST, f"hidden_states = hidden_states * 2\n        {TEST}"),
        # what else either branch does
        (LAST, f"{LAST}\n            out = out * 2"),
        (LAST, f"{LAST}\n            out += 1"),
        (LAST, f"{LAST}\n            out.mul_(2)"),
        (LAST, f"{LAST}\n            out[~is_vision] += hidden_states.mean()"),
        (LAST, f"{LAST}\n            return out * 2"),
        (LAST, f"{LAST}\n            out = torch.zeros_like(out)"),
        ("out = torch.zeros_like(hidden_states)", "out = hidden_states"),
        ("out = torch.zeros_like(hidden_states)", "out = torch.zeros_like(hidden_states.mul_(2))"),
        (
            "out = torch.zeros_like(hidden_states)",
            "out = torch.zeros_like(hidden_states)\n            other = torch.ones_like(out)",
        ),
        ("        return out", "            out = out * 2\n        return out"),
        ("out = self.text_moe(hidden_states)", "other = self.text_moe(hidden_states)"),
        ("        return out", "        return out if columns is None else out * 2"),
    ],
)
def test_a_branch_of_another_form_is_refused_on_several_ranks(old, new):
    text = BLOCK.replace(old, new)
    if "states = hidden_states * 2" in new:
        text = text.replace("moe(hidden_states", "moe(states")
    assert text != BLOCK
    written = applied(UnevenBranches(), text).module.text
    assert "ops.refuse_uneven_ranks" in written and "tokens_of_any_rank" not in written


def test_a_branch_within_another_is_refused_on_several_ranks():
    head, body = BLOCK.split(TEST)
    inside, end = body.split("        return out")
    nested = f"if hidden_states.shape[0] > 1:\n            {TEST}" + inside.replace("\n    ", "\n        ")
    written = applied(UnevenBranches(), f"{head}{nested.rstrip()}\n        return out{end}").module.text
    assert "ops.refuse_uneven_ranks" in written and "tokens_of_any_rank" not in written
