"""What the constructions of a class in its file give a parameter of its `__init__`."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

A = """
class A(nn.Module):
    def __init__(self, act, config=None):
        self.act = act

class Model(nn.Module):
    def __init__(self, config):
        self.a = A(nn.SiLU())
"""


def given(code: str, owner: str = "A") -> list[str]:
    anatomy = anatomy_of(f"{A}\n{code}\n")
    init = anatomy.method(owner, "__init__")
    return [
        ast.unparse(value) for _, value in anatomy.constructions.given(init[1], "act", [owner]) if value is not None
    ]


@pytest.mark.parametrize(
    ("code", "owner", "values"),
    [
        ("", "A", ["nn.SiLU()"]),
        ("def made():\n    return A(act=nn.Tanh())", "A", ["nn.SiLU()", "nn.Tanh()"]),
        ("class M:\n    def __init__(self, xs):\n        xs += [A(nn.Tanh()) for _ in range(2)]", "A", ["nn.SiLU()", "nn.Tanh()"]),
        ("TABLE = {'a': A}\ndef made():\n    return TABLE['a'](nn.Tanh())", "A", ["nn.SiLU()", "nn.Tanh()"]),
        ("class M:\n    def __init__(self, xs):\n        self.a = A(*xs)", "A", ["nn.SiLU()", "*xs"]),
        ("class B(A):\n    def __init__(self):\n        super().__init__(nn.Tanh())", "B", ["nn.Tanh()"]),
        ("class B(A):\n    def __init__(self):\n        A.__init__(self, nn.Tanh())", "B", ["nn.Tanh()"]),
    ],
)  # fmt: skip
def test_calls_of_a_class_and_of_the_init_of_its_base_count(code: str, owner: str, values: list[str]):
    assert given(code, owner) == values
