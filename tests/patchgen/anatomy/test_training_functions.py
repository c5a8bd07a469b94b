"""What training runs: each function once, with the reason if training never runs it.

The reasons are those of `patchgen/anatomy/training_path.py`.
"""

from __future__ import annotations

import ast
import textwrap

import pytest

from patchgen import source
from patchgen.anatomy.training_path import reachable_functions, statements_with_reasons

FILE = """
def helper(x):
    return helper(x) + other(x)

def other(x):
    return x

def unused(x):
    return x

class Base:
    def step(self, x):
        return self.last(x)

    def last(self, x):
        return x

class Model(Base):
    def __init__(self):
        self.build()

    def build(self):
        pass

    def forward(self, x, position_ids=None):
        if position_ids is None:
            position_ids = self.positions(x)
        if is_flash_attention_requested(self.config):
            y = self.step(x)
        else:
            y = self.slowly(x)
        return helper(y) + self.step(x) + outside(x)

    def positions(self, x):
        return self.counted(x)

    def counted(self, x):
        return x

    def slowly(self, x):
        return self.step(x)

    def last(self, x):
        return other(x)
"""
ONLY_IF_NOT_GIVEN = "only where position_ids is not handed in"


def test_each_function_once_with_a_reason_if_every_call_has_one():
    found = [(name, function.name, why) for name, function, why in reachable_functions(source.parse(FILE))]
    assert sorted(found) == [
        ("Base.step", "step", ""),
        ("Model.counted", "counted", ONLY_IF_NOT_GIVEN),
        ("Model.forward", "forward", ""),
        ("Model.last", "last", ""),
        ("Model.positions", "positions", ONLY_IF_NOT_GIVEN),
        ("Model.slowly", "slowly", "attention without packed lengths"),
        ("helper", "helper", ""),
        ("other", "other", ""),
    ]


def test_methods_are_resolved_by_the_mro():
    class_template = "class {}:\n    def run(self, x):\n        return x\n"
    model = "class Q(B, C):\n    def forward(self, x):\n        return self.run(x)\n"
    text = class_template.format("D") + "class B(D): pass\n" + class_template.format("C") + model
    assert [name for name, _, _ in reachable_functions(source.parse(text))] == ["Q.forward", "D.run"]
    text = text.replace("class C:", "class C(D):")
    assert [name for name, _, _ in reachable_functions(source.parse(text))] == ["Q.forward", "C.run"]


@pytest.mark.parametrize(
    ("code", "reasons"),
    [
        ("if position_ids is other:\n    a = 1", {"position_ids is other": "", "a = 1": ""}),
        ("if x and position_ids is other:\n    a = 1", {"x and position_ids is other": "", "a = 1": ""}),
        ("if position_ids is not other:\n    return x\na = 1", {"position_ids is not other": "", "return x": "", "a = 1": ""}),
        ("a = 1", {"a = 1": ""}),
        ("if position_ids is None:\n    a = 1\nb = 2", {"position_ids is None": "", "a = 1": ONLY_IF_NOT_GIVEN, "b = 2": ""}),
        ("if x is None:\n    a = 1", {"x is None": "", "a = 1": ""}),
        ("if position_ids is not None:\n    a = 1", {"position_ids is not None": "", "a = 1": ""}),
        ("if x and position_ids is None:\n    a = 1", {"x and position_ids is None": "", "a = 1": ONLY_IF_NOT_GIVEN}),
        ("if x or position_ids is None:\n    a = 1", {"x or position_ids is None": "", "a = 1": ""}),
        ("y = kwargs.pop('y', None)\nif y is None:\n    a = 1", {"y = kwargs.pop('y', None)": "", "y is None": "", "a = 1": "only where y is not handed in"}),
        ("y = kwargs.get('y')\nif y is None:\n    a = 1", {"y = kwargs.get('y')": "", "y is None": "", "a = 1": ""}),
        ("if (y := kwargs.pop('y')) is not None:\n    return y\na = 1", {"(y := kwargs.pop('y')) is not None": "", "return y": "", "a = 1": "only where y is not handed in"}),
        ("if (y := kwargs.pop('y')) is not None:\n    b = y\na = 1", {"(y := kwargs.pop('y')) is not None": "", "b = y": "", "a = 1": ""}),
        ("if x:\n    if position_ids is not None:\n        return x\na = 1", {"x": "", "position_ids is not None": "", "return x": "", "a = 1": ONLY_IF_NOT_GIVEN}),
        # Of `runtime/multimodal_ops.py`, written by the pass vision_sp: whether attention takes packed lengths.
        ("if attends_by_lengths(x):\n    a = 1\nelse:\n    b = 2", {"attends_by_lengths(x)": "", "a = 1": "", "b = 2": "attention without packed lengths"}),
        ("if other(x):\n    a = 1\nelse:\n    b = 2", {"other(x)": "", "a = 1": "", "b = 2": ""}),
        ("for i in x:\n    a = 1\nelse:\n    b = 2", {"x": "", "a = 1": "", "b = 2": ""}),
        ("while x:\n    a = 1", {"x": "", "a = 1": ""}),
        ("with x:\n    a = 1", {"x": "", "a = 1": ""}),
        ("try:\n    a = 1\nexcept E:\n    b = 2", {"a = 1": "", "b = 2": ""}),
        ("try:\n    a = 1\nfinally:\n    b = 2", {"a = 1": "", "b = 2": ""}),
        ("a = 1\nif ops.serves('norm'):\n    return x\nb = 2", {"a = 1": ""}),
        ("if position_ids is None:\n    if position_ids is None:\n        a = 1", {"position_ids is None": ONLY_IF_NOT_GIVEN, "a = 1": ONLY_IF_NOT_GIVEN}),
    ],
)  # fmt: skip
def test_statements_and_the_reason_why_they_do_not_run(code: str, reasons: dict[str, str]):
    function = ast.parse("def f(self, x, position_ids=None, **kwargs):\n" + textwrap.indent(code, "    ")).body[0]
    assert {ast.unparse(part): why for part, why in statements_with_reasons(function, "")} == reasons
    assert {why for part, why in statements_with_reasons(function, "the caller's reason")} <= {"the caller's reason"}


SIZES = "sizes = split_sizes or grid.tolist()"


@pytest.mark.parametrize(
    ("name", "annotation", "code", "why"),
    [
        ("get_image_features", "list[int] | None", SIZES, "only where split_sizes is not handed in"),
        ("get_image_features", "Tensor | None", SIZES, ""),
        ("get_rope_index", "list[int] | None", SIZES, ""),
        ("get_image_features", "list[int] | None", "sizes = split_sizes or grid.max().item()", ""),
    ],
)
def test_sizes_are_handed_in_only_in_the_form_that_host_values_writes(name: str, annotation: str, code: str, why: str):
    """Method, type and `or <tensor>.tolist()` must be those of the pass. Any other parameter is upstream's, and no collator
    knows it."""
    function = ast.parse(f"def {name}(self, grid, split_sizes: {annotation} = None, **kwargs):\n    {code}").body[0]
    assert [why for _, why in statements_with_reasons(function, "")] == [why]
