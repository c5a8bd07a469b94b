"""What an attribute that `__init__` takes from its parameters may be: what every construction of the class hands in."""

from __future__ import annotations

import pytest
from generation_cases import anatomy_of
from test_graph import told

HANDED = """
class A(nn.Module):
    def __init__(self, act):
        self.act = act

class Model(nn.Module):
    def __init__(self):
        self.a = A(nn.SiLU())
"""


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("class B(A):\n    def __init__(self):\n        super().__init__(nn.Softmax(1))", ["nn.SiLU()", "nn.Softmax(1)"]),
        ("class B(A):\n    def __init__(self):\n        A.__init__(self, act=nn.Tanh())", ["nn.SiLU()", "nn.Tanh()"]),
        ("class B(A):\n    def __init__(self, **more):\n        super().__init__(**more)", ["nn.SiLU()", "more"]),
        ("class B(A): pass\nclass M:\n    def __init__(self):\n        self.b = B(nn.Tanh())", ["nn.SiLU()", "nn.Tanh()"]),
        ("class B(A):\n    def __init__(self, act):\n        self.act2 = act\n        super().__init__(nn.Tanh())", ["nn.SiLU()", "nn.Tanh()"]),
        ("class B:\n    def __init__(self, act):\n        self.a = A(act)", ["nn.SiLU()", "act"]),
        ("class B:\n    def __init__(self):\n        act = nn.Tanh()\n        self.a = A(act)", ["nn.SiLU()", "nn.Tanh()"]),
        ("class B:\n    def __init__(self):\n        act = nn.Tanh()\n        act = nn.GELU()\n        self.a = A(act)", ["nn.SiLU()", "nn.Tanh()", "nn.GELU()"]),
        ("class B:\n    def __init__(self, *xs):\n        self.a = A(*xs, nn.Tanh())", ["nn.SiLU()", "*xs"]),
    ],
)  # fmt: skip
def test_what_subclasses_hand_on_counts(code: str, values: list[str]):
    anatomy = anatomy_of(f"{HANDED}\n{code}\n")
    assert told(anatomy.handed("A", anatomy.attribute("A", "act"))) == values


BUILT = {
    "in a list": ("", "parts.append(A(nn.Softmax(1)))", "nn.Softmax(1)"),
    "in a comprehension": ("", "parts += [A(nn.Softmax(1)) for _ in range(2)]", "nn.Softmax(1)"),
    "in an argument": ("", "nn.Sequential(A(nn.Softmax(1)))", "nn.Softmax(1)"),
    "in a function": ("def made():\n    return A(nn.Softmax(1))\n", "pass", "nn.Softmax(1)"),
    "for a config": ("", "part = A._from_config(nn.Softmax(1))", "nn.Softmax(1)"),
    "by another name": ("", "kind = A\n        self.part = kind(nn.Softmax(1))", "*A"),
    "by a choice": ("", "kind = A if act else B\n        self.part = kind(nn.Softmax(1))", "*A"),
    "by a table": ("TABLE = {'a': A}\n", "self.part = TABLE['a'](nn.Softmax(1))", "*A"),
    "by a library": ("import functools\n", "self.part = functools.partial(A, nn.Softmax(1))()", "*A"),
    "by its own method": ("class B(A):\n    def again(self):\n        return type(self)(nn.Softmax(1))\n", "pass", "nn.Softmax(1)"),
    "with a local name": ("", "kind = nn.Softmax(1)\n        self.part = A(kind)", "nn.Softmax(1)"),
    "with a name of two values": ("", "if act: act = nn.Tanh()\n        self.part = A(act)", "nn.Tanh()"),
    "by a base of its base": ("class B(A):\n    def __init__(self): pass\nclass C(B):\n    def __init__(self):\n        super(B, self).__init__(nn.Softmax(1))\n", "pass", "nn.Softmax(1)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BUILT)
def test_every_construction_says_what_a_parameter_is(case: str):
    above, code, value = BUILT[case]
    builder = f"class M(nn.Module):\n    def __init__(self, act, parts):\n        {code}\n"
    anatomy = anatomy_of(f"{HANDED}\n{above}\n{builder}")
    assert value in told(anatomy.handed("A", anatomy.attribute("A", "act")))


@pytest.mark.parametrize(
    "code",
    [
        "class B(nn.Module):\n    def of(self, part: A) -> A:\n        return isinstance(part, (A, B))",
        "class B(nn.Module):\n    _can_record_outputs = {'states': [A]}",
        "def run(x):\n    return A.forward(x)",
    ],
)
def test_a_class_that_code_only_asks_for_is_not_built_there(code: str):
    anatomy = anatomy_of(f"{HANDED}\n{code}\n")
    assert told(anatomy.handed("A", anatomy.attribute("A", "act"))) == ["nn.SiLU()"]


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("act = act or nn.Softmax(1)", ["act or nn.Softmax(1)", "nn.SiLU()"]),
        ("if act is None:\n            act = nn.Softmax(1)", ["nn.Softmax(1)", "nn.SiLU()"]),
        ("act, more = chosen(act)", ["*act", "nn.SiLU()"]),
        ("for act in (nn.Tanh(), nn.Softmax(1)): pass", ["*act", "nn.SiLU()"]),
    ],
)
def test_what_an_init_binds_a_parameter_to_counts(code: str, values: list[str]):
    anatomy = anatomy_of(HANDED.replace("self.act = act", f"{code}\n        self.act = act"))
    assert told(anatomy.handed("A", anatomy.attribute("A", "act"))) == values


def test_what_a_default_hands_counts_where_nothing_else_is_handed():
    anatomy = anatomy_of(
        HANDED.replace("self, act)", "self, act=nn.Softmax(1))").replace("nn.SiLU()", "")
        + "        self.b = A(nn.SiLU())\n"
    )
    assert told(anatomy.handed("A", anatomy.attribute("A", "act"))) == ["nn.Softmax(1)", "nn.SiLU()"]


def test_a_name_of_another_method_is_not_the_parameter_of_the_init():
    anatomy = anatomy_of(
        HANDED.replace(
            "        self.act = act", "        self.act = act\n\n    def change(self, act):\n        self.act = act"
        )
    )
    assert [told(anatomy.handed("A", value)) for value in anatomy.held("A", "act")] == [["nn.SiLU()"], []]


def test_a_parameter_is_that_of_the_init_that_reads_it():
    below = "class B(A):\n    def __init__(self, act):\n        super().__init__(nn.Softmax(act))\n"
    built = "class M:\n    def __init__(self):\n        self.b = B(1)\n"
    anatomy = anatomy_of(f"{HANDED}\n{below}{built}")
    (act,) = anatomy.held("B", "act")
    assert told(anatomy.handed("B", act)) == ["nn.Softmax(act)"]
    assert told(anatomy.handed("B", anatomy.handed("B", act)[0].args[0])) == ["1"]


@pytest.mark.parametrize("outside", ["nn.SiLU()", None])
def test_classes_that_hand_a_value_to_each_other_end(outside: str | None):
    """The heir of a class is built in its `__init__`, with what that was handed; without another builder nothing is known."""
    code = (
        "class A(nn.Module):\n    def __init__(self, act):\n        self.act = act\n        self.sub = B(act)\n"
        "class B(A):\n    def __init__(self, act):\n        super().__init__(act)\n"
    )
    code += f"class M:\n    def __init__(self):\n        self.a = A({outside})\n" if outside else ""
    anatomy = anatomy_of(code)
    assert {*told(anatomy.handed("A", anatomy.attribute("A", "act")))} == ({outside} if outside else set())
