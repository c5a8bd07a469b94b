"""Names stand for what imports, definitions and scopes say; what a class holds, for what its methods assign."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.names import Names, is_of_config, local_names

FILE = """
import torch, torch.utils.checkpoint
import torch.nn.functional as F
from torch import nn
from ...activations import ACT2FN
try:
    from fast import cap
except ImportError:
    def cap(x): ...
if here:
    from one import twice
else:
    from other import twice
def rotate(x): ...
"""


@pytest.mark.parametrize(
    ("expression", "meaning"),
    [
        ("F.linear", "torch.nn.functional.linear"),
        ("nn.functional.linear", "torch.nn.functional.linear"),
        ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint"),
        ("checkpoint.checkpoint", None),
        ("ACT2FN", "transformers.activations.ACT2FN"),
        ("rotate", ".rotate"),
        ("cap", ".cap"),
        ("len", "builtins.len"),
        ("twice", None),
        ("unknown", None),
        ("self.linear", None),
        ("call().linear", None),
    ],
)
def test_an_expression_stands_for(expression, meaning):
    names = Names(ast.parse(FILE).body, lambda level: ["transformers", "models", "example"][: 4 - level])
    assert names.resolve(ast.parse(expression, mode="eval").body) == meaning


def test_a_local_name_hides_an_import():
    function = ast.parse("def f(F, *a, **k):\n  import nn\n  def torch(): ...\n  [x for x in a]\n  return F").body[0]
    assert local_names(function) == {"F", "a", "k", "nn", "torch", "x"}
    names = Names(ast.parse(FILE).body)
    assert names.resolve(ast.parse("F.linear", mode="eval").body, local_names(function)) is None


@pytest.mark.parametrize(
    ("code", "is_config"),
    [
        ("self.config.sizes[0]", True),
        ("self.config.get_text_config().size", True),
        ("config.act(x)", False),
        ("self.config.table(x)[0]", False),
        ("(x or y).config.size", False),
        ("config_of(x).config.size", False),
    ],
)
def test_a_part_of_a_config_is_no_result_of_a_call(code: str, is_config: bool):
    assert is_of_config(ast.parse(code, mode="eval").body) is is_config


HELD = """
class Experts(nn.Module):
    factor = 2
    def __init__(self, config, act):
        self.one = nn.SiLU()
        self.two = nn.SiLU() if config.silu else nn.GELU()
        self.twice = nn.SiLU()
        self.twice = nn.Identity()
        self.hidden, self.other = sizes(config)
        self.factor = 3
        self.overridden = nn.SiLU()
    def gate(self, x): ...
    def set_act(self, new):
        self.one = new

class Narrow(Experts):
    def overridden(self, x): ...
"""


@pytest.mark.parametrize(
    ("attribute", "held"),
    [
        ("one", ["nn.SiLU()"]),
        ("two", ["nn.SiLU()", "nn.GELU()"]),
        ("twice", ["nn.SiLU()", "nn.Identity()"]),
        ("hidden", ["self.hidden, self.other = sizes(config)"]),
        ("factor", ["3"]),
        ("overridden", []),
        ("absent", []),
        ("gate", ["def gate(self, x):\n    ..."]),
    ],
)
def test_an_attribute_is_all_that_the_class_may_assign_to_it(attribute, held):
    assert [ast.unparse(value) for value in anatomy_of(HELD).held("Experts", attribute)] == held
