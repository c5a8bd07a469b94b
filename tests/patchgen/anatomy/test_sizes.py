"""By which name a config holds a size: told by all that an attribute may hold, and by the one class that a module is of."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.sizes import in_config

FILE = """
class Tower(nn.Module):
    def __init__(self, config, other):
        super().__init__()
        self.side = config.merge_size
        {more}

class Other(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.side = config.patch_size

class Model(nn.Module):
    def __init__(self, config, other):
        super().__init__()
        self.visual = {built}
"""


def found(value: str, more: str = "pass", built: str = "Tower(config)", owner: str = "Model") -> str | None:
    anatomy = anatomy_of(FILE.format(more=more, built=built))
    return in_config(anatomy, owner, ast.parse(value, mode="eval").body)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("self.visual.side", "merge_size"),
        ("self.config.merge_size", "merge_size"),
        ("config.vision_config.merge_size", "merge_size"),
        ("other.merge_size", None),  # a parameter of any meaning
        ("config.merge_size(x)", None),
        ("config.side(x).merge_size", None),
        ("self.visual(x).side", None),
        ("self.nothing.side", None),
        ("merge_size", None),
        ("2", None),
    ],
)
def test_a_size_is_named_by_what_it_is_read_from(value: str, name: str | None):
    assert found(value) == name


@pytest.mark.parametrize(
    ("more", "built"),
    [
        ("self.side = 3", "Tower(config)"),
        ("self.side = config.patch_size", "Tower(config)"),
        ("self.side = self.side", "Tower(config)"),
        ("pass", "Tower(config) if other else Other(config)"),
        ("pass", "Tower(config) if other is None else other"),
        ("pass", "Tower(config).inner"),
        ("pass", "Wrapper(Tower(config))"),
        ("pass", "pick([Tower(config), other])"),
        ("pass", "Tower(config)\n        if other: self.visual = other"),
        ("pass", "Tower(config)\n    def swap(self, config):\n        self.visual = Other(config)"),
    ],
)
def test_a_size_of_which_more_is_stored_has_no_name(more: str, built: str):
    assert found("self.visual.side", more, built) is None
