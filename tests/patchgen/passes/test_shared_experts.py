"""Shared experts move beside the exchange where nothing can change by it; else the pass says why not."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.passes.shared_experts import SharedExperts

MODULES = SharedExperts.EXAMPLES[0].before.partition("    def forward(self, hidden_states, weights, indices):\n")[0]
LINEAR = """\
class ExampleMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.size)
        self.down_proj = nn.Linear(config.size, config.hidden_size)

    def forward(self, x):
        return self.down_proj(F.gelu(self.up_proj(x)))
"""


def outcome_of(forward: str, modules: str = MODULES):
    lines = "".join(f"        {line}\n" for line in forward.strip().splitlines())
    return applied(SharedExperts(), f"{modules}    def forward(self, hidden_states, weights, indices):\n{lines}")


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        pytest.param(
            "out = self.experts(hidden_states, indices, weights)\n"
            "if self.is_shared:\n"
            "    out = out + self.shared_experts(hidden_states)\n"
            "return out",
            "under a condition",
            id="condition",
        ),
        pytest.param(
            "out = self.experts(hidden_states, indices, weights)\n"
            "return out + (self.shared_experts(hidden_states) if self.is_shared else 0)",
            "under a condition",
            id="conditional-expression",
        ),
        pytest.param(
            "out = self.experts(hidden_states, indices, weights)\n"
            "match self.kind:\n"
            "    case 1:\n"
            "        out = out + self.shared_experts(hidden_states)\n"
            "return out",
            "under a condition",
            id="match",
        ),
        pytest.param(
            "hidden_states = self.experts(hidden_states, indices, weights)\n"
            "return hidden_states + self.shared_experts(hidden_states)",
            "written between",
            id="reads-what-the-experts-wrote",
        ),
        pytest.param(
            "shared = self.shared_experts(hidden_states)\n"
            "hidden_states = hidden_states + shared\n"
            "return self.experts(hidden_states, indices, weights)",
            "read before",
            id="read-before-the-experts",
        ),
        pytest.param(
            "shared = self.shared_experts(hidden_states) * 2\n"
            "return shared + self.experts(hidden_states, indices, weights)",
            "computed with before",
            id="arithmetic",
        ),
        pytest.param(
            "shared = self.shared_experts(hidden_states).mul(2)\n"
            "return shared + self.experts(hidden_states, indices, weights)",
            "computed with before",
            id="arithmetic-by-a-method",
        ),
        pytest.param(
            "shared = self.shared_experts(hidden_states).view(rows, -1)\n"
            "rows = 2\n"
            "out = self.experts(hidden_states, indices, weights)\n"
            "return out + shared",
            "written between",
            id="reshaped-by-a-name-that-changes",
        ),
        pytest.param(
            "return self.experts(hidden_states, indices, weights) + self.shared_experts(hidden_states)",
            "in one statement",
            id="one-statement",
        ),
        pytest.param(
            "out = self.experts(hidden_states, indices, weights)\n"
            "return out + self.shared_experts(hidden_states) + self.shared_experts(out)",
            "called 2 times",
            id="twice",
        ),
    ],
)
def test_what_would_change_is_left_alone_with_the_reason(forward: str, reason: str):
    outcome = outcome_of(forward)
    assert outcome.hits == ()
    assert len(outcome.notes) == 1 and reason in outcome.notes[0], outcome.notes


def test_a_name_that_changes_after_the_call_is_bound_where_the_call_stood():
    """The argument is handed over at upstream's place, so that the experts' own assignment does not reach it."""
    text = outcome_of(
        "shared = self.shared_experts(hidden_states).view(2, -1)\n"
        "hidden_states = self.experts(hidden_states, indices, weights)\n"
        "hidden_states = hidden_states * self.scale\n"
        "return hidden_states + shared"
    ).module.text
    order = [
        "shared_beside = ops.beside_experts(self.shared_experts, hidden_states, at_once=True)",
        "hidden_states = self.experts(",
        "shared = shared_beside().view(2, -1)",
        "hidden_states = hidden_states * self.scale",
    ]
    assert [text.index(line) for line in order] == sorted(text.index(line) for line in order)


def test_an_argument_that_is_computed_is_computed_where_upstream_does():
    """A view made above the experts would add up gradients in another order."""
    text = outcome_of(
        "out = self.experts(hidden_states, indices, weights)\nreturn out + self.shared_experts(hidden_states.view(2, -1))"
    ).module.text
    assert "ops.beside_experts(lambda: self.shared_experts(hidden_states.view(2, -1)))" in text


def test_an_mlp_without_a_gate_is_a_site():
    start = MODULES.index("class ExampleExperts")
    modules = f"{LINEAR}\n\n{MODULES[start:]}"
    forward = "out = self.experts(hidden_states, indices, weights)\nreturn out + self.shared_experts(hidden_states)"
    assert [hit.site for hit in outcome_of(forward, modules).hits] == ["ExampleMoE.forward"]
