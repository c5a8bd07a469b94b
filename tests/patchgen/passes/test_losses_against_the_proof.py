"""Changes of a head, its loss and its router loss that no pass refuses: the proof tells each, or the file computes the same."""

from __future__ import annotations

import pytest
from changed_losses import ALL, SourceChange
from judged import EQUAL, REFUSED, TOLD, judged

from patchgen.runtime.verify.ranks import RankPool

FAST = {"a term of one rank's tokens", "logits handed to it where there are any"}
HARMLESS = {"another name for the logits", "router logits changed above"}
"""What the pass moves or drops is nothing that a step reads."""
NOT_WRITTEN = {"labels moved by the logits", "an argument made of the logits"}
"""The head becomes a function, and the seam stands above the logits."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.title, marks=() if case.title in FAST else pytest.mark.slow) for case in ALL],
)
def test_a_change_of_a_loss_is_never_silent(case: SourceChange, two_ranks: RankPool):
    found = judged(case, pool=two_ranks)
    expected = EQUAL if case.title in HARMLESS else REFUSED if case.title in NOT_WRITTEN else TOLD
    assert found.kind == expected, found
