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


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("grids * 2 if grids.any() else grids", "if grids.any()"),
        ("[one for one in self.all_of(grids) if one.all()]", "if one.all()"),
        ("1 if torch.any(grids) else 2", "if torch.any(grids)"),
        ("1 if any(self.flags) else 2", ""),  # of a list
        ("torch.nonzero(grids)", "torch.nonzero(grids)"),
        ("vision.get_vision_position_ids(grids, 2)", "vision.get_vision_position_ids(grids, 2)"),
        ("vision.get_vision_position_ids(grids, 2, kwargs=kwargs)", ""),
        ("vision.cpu()", ""),  # a function of a module
    ],
)
def test_a_host_that_waits_within_an_expression_is_seen(code: str, found: str):
    text = TOWER.format("\nfrom transformers import vision_utils as vision", "", code)
    assert applied(HostSyncLint(), text).notes == ((f"ExampleTower.forward: `{found}`",) if found else ())


def test_an_assertion_on_a_tensor_waits():
    text = TOWER.format("", "", "grids").replace("return", "assert (grids > 0).all()\n        return")
    assert applied(HostSyncLint(), text).notes == ("ExampleTower.forward: `if (grids > 0).all()`",)
