"""Which calls wait for the device is told by what they stand for."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.passes.host_sync_lint import HostSyncLint

TOWER = """
from transformers.vision_utils import get_vision_position_ids{}

{}class ExampleTower(nn.Module):
    def forward(self, grids, **kwargs):
        return {}
"""


@pytest.mark.parametrize(
    ("alias", "own", "call", "waits"),
    [
        ("", "", "get_vision_position_ids(grids, 2)", True),
        (" as positions_of", "", "positions_of(grids, 2)", True),
        (" as positions_of", "", "positions_of(grids, 2, kwargs=kwargs)", False),
        (" as positions_of", "", "positions_of(grids, 2, False, kwargs)", False),
        ("", "def get_vision_rows(x):\n    return x + 1\n\n\n", "get_vision_rows(grids)", False),
        ("", "", "[get_vision_position_ids(one, 2) for get_vision_position_ids in grids]", False),
        ("", "from transformers.vision_utils import get_max_seqlen\n\n\n", "get_max_seqlen(grids, self.config)", True),
    ],
)
def test_transformers_helpers_wait_unless_they_are_handed_what_was_computed(
    alias: str, own: str, call: str, waits: bool
):
    notes = applied(HostSyncLint(), TOWER.format(alias, own, call)).notes
    assert notes == ((f"ExampleTower.forward: `{call}`",) if waits else ())


def test_a_branch_on_a_tensor_waits():
    text = TOWER.format("", "", "grids * 2 if grids.any() else grids").replace(
        "return", "if grids.any():\n            return"
    )
    assert "ExampleTower.forward: `if grids.any()`" in applied(HostSyncLint(), text).notes
