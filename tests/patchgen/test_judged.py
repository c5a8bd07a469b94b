"""The helper that holds changed sources against the proof says each of its verdicts."""

from __future__ import annotations

import pytest
from changed_sources import SourceChange, changed
from judged import EQUAL, NOT_RUN, REFUSED, TOLD, judged

from patchgen.runtime.verify import told

GATED = "hidden_states = self.post_attention_layernorm(hidden_states)\n"


def after_the_norm(code: str) -> SourceChange:
    return changed("", "qwen3_moe", code, (GATED, f"{GATED}        {code}\n"))


@pytest.mark.parametrize(
    ("code", "kind", "by"),
    [
        ("hidden_states = hidden_states * max(1.0, hidden_states.shape[1] / 8192)", TOLD, told.FACT),
        ("hidden_states = hidden_states + hidden_states.flip(1)", TOLD, told.PROOF),
        ("hidden_states = hidden_states * 1.25", EQUAL, ""),
        ("hidden_states = hidden_states[0, 10_000]", NOT_RUN, ""),
    ],
)
def test_a_change_is_told_equal_or_does_not_run(code: str, kind: str, by: str):
    found = judged(after_the_norm(code))
    assert (found.kind, found.by) == (kind, by), found


def test_what_a_pass_cannot_write_is_refused():
    renamed = changed("", "qwen3_moe", "", ("self.loss_function(", "self.compute_loss("))
    found = judged(renamed)
    assert (found.kind, found.by) == (REFUSED, "fused_loss"), found
