"""What an attribute that `__init__` takes from its parameters may be: what every construction of the class hands in."""

from __future__ import annotations

import pytest
from generation_cases import anatomy_of
from test_graph import told

from patchgen.anatomy.origins import origins

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
        ("class B(A):\n    def __init__(self, **more):\n        super().__init__(**more)", ["nn.SiLU()", "*more"]),
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


@pytest.mark.parametrize("inner", ["make = lambda act: act", "def make(act): ...", "def make(*, act=nn.GELU()): ..."])
def test_a_parameter_that_an_inner_function_has_too_may_be_anything(inner: str):
    anatomy = anatomy_of(HANDED.replace("        self.act = act", f"        {inner}\n        self.act = act"))
    assert told(anatomy.handed("A", anatomy.attribute("A", "act"))) == ["*act"]
    assert told(part for _, part in origins(anatomy, "A", anatomy.attribute("A", "act"))) == ["act"]  # its own origin


BUILT = {
    "in a list": ("", "parts.append(A(nn.Softmax(1)))", "nn.Softmax(1)"),
    "in a comprehension": ("", "parts += [A(nn.Softmax(1)) for _ in range(2)]", "nn.Softmax(1)"),
    "in an argument": ("", "nn.Sequential(A(nn.Softmax(1)))", "nn.Softmax(1)"),
    "in a function": ("def made():\n    return A(nn.Softmax(1))\n", "pass", "nn.Softmax(1)"),
    "for a config": ("", "part = A._from_config(nn.Softmax(1))", "nn.Softmax(1)"),
    "by another name": ("", "kind = A\n        self.part = kind(nn.Softmax(1))", "*A"),
    "by a choice": ("", "kind = A if act else B\n        self.part = kind(nn.Softmax(1))", "*A"),
    "by a table": ("TABLE = {'a': A}\n", "self.part = TABLE['a'](nn.Softmax(1))", "nn.Softmax(1)"),
    "by a table under another name": ("TABLE = {'a': A}\n", "part = TABLE['a']\n        part(nn.Softmax(1))", "*TABLE['a']"),
    "by a method of a table": ("TABLE = {'a': A}\n", "self.part = TABLE['a'] or TABLE.get('a')(nn.Softmax(1))", "*TABLE"),
    "by a table with another's": ("OTHER = {'a': A}\nTABLE = {**OTHER}\n", "self.part = OTHER['a'](nn.Tanh()), TABLE['a'](nn.Softmax(1))", "*OTHER"),
    "by a table of tables": ("TABLE = {'a': {'b': A}}\n", "self.part = TABLE['a']['b'](nn.Softmax(1))", "*A"),
    "by a table that changes": ("TABLE = {'a': A}\nTABLE.update(b=B)\n", "self.part = TABLE['a'](nn.Softmax(1))", "*A"),
    "by a table in brackets": ("TABLE = {'a': A}\n", "self.part = TABLE['a'] or [TABLE][0]['a'](nn.Softmax(1))", "*TABLE"),
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


HEIR = "class B(A):\n    def __init__(self, other):\n        "
BUILDER = "class B(nn.Module):\n    def __init__(self, other):\n        "
BELOW = "class Mid(A): pass\nclass B(Mid):\n    def __init__(self):\n        "
TWO_BASES = (
    "class C(A):\n    def __init__(self):\n        super().__init__(nn.Tanh())\n"
    "class B(A):\n    def __init__(self):\n        super().__init__(nn.Softmax(1))\nclass D(B, C): pass"
)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (f"{HEIR}super(__class__, self).__init__(nn.Softmax(1))", "nn.Softmax(1)"),
        (f"{HEIR}super(type(self), self).__init__(nn.Softmax(1))", "nn.Softmax(1)"),
        (f"{BELOW}Mid.__init__(self, nn.Softmax(1))", "nn.Softmax(1)"),
        (f"{BELOW}super(Mid, self).__init__(nn.Softmax(1))", "nn.Softmax(1)"),
        (TWO_BASES, "nn.Softmax(1)"),
        (f"{HEIR}super().__init__(**{{'act': nn.Softmax(1)}})", "*{'act': nn.Softmax(1)}"),
        (f"{BUILDER}self.b = self.a.__class__(nn.Softmax(1))", "nn.Softmax(1)"),
        (f"{BUILDER}self.b = type(other)(nn.Softmax(1))", "nn.Softmax(1)"),
        (f"{BUILDER}kind = type(other)\n        self.b = kind(nn.Softmax(1))", "*type(other)"),
        (f"{BUILDER}self.x.__init__(nn.Softmax(1))", "*self.x.__init__"),
        (f"{HEIR}s = super()\n        s.__init__(nn.Softmax(1))", "*s.__init__"),
        (f"{HEIR}init = A.__init__\n        init(self, nn.Softmax(1))", "*A.__init__"),
        (f"{BUILDER}A.__init__(other, nn.Softmax(1))", "*A.__init__"),
        ("class B(A):\n    def again(self):\n        super().__init__(nn.Softmax(1))", "*super().__init__"),
    ],
)  # fmt: skip
def test_no_construction_is_dropped(code: str, value: str):
    anatomy = anatomy_of(f"{HANDED}\n{code}\n")
    assert value in told(anatomy.handed("A", anatomy.attribute("A", "act")))


@pytest.mark.parametrize(
    "code",
    [
        f"{BUILDER}nn.Module.__init__(self)",
        f"{BUILDER}print(f'{{self.__class__}}', type(other).__name__, type(other) is A)",
        f"{BUILDER}cache = type(other.cache)\n        other.cache = cache(nn.Softmax(1))",
        "class B(nn.Module):\n    def __init__(self):\n        super(B, self).__init__()",
    ],
)
def test_code_that_asks_for_the_class_of_an_object_builds_none(code: str):
    anatomy = anatomy_of(f"{HANDED}\n{code}\n")
    assert told(anatomy.handed("A", anatomy.attribute("A", "act"))) == ["nn.SiLU()"]


OF_PARAMETER = """
class Good(nn.Module):
    def __init__(self):
        self.fn = nn.SiLU()

class Bad(nn.Module):
    def __init__(self):
        self.fn = nn.Softmax(1)

class A(nn.Module):
    def __init__(self, other):
        self.act = other.fn

class Between(nn.Module):
    def __init__(self, inner):
        self.a = A(inner)

class Model(nn.Module):
    def __init__(self, config, outside):
        self.a = A(Good())
"""


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("self.b = A(Bad())", "nn.Softmax(1)"),
        ("self.b = Between(Bad())", "nn.Softmax(1)"),
        ("kind = A\n        kind(Bad())", "*A"),
        ("self.b = A(outside)", "*outside"),
        ("self.bad = Bad()\n        self.b = A(self.bad)", "*self.bad"),
        ("self.b = A(make(Bad()))", "*make(Bad())"),
        ("self.b = A(Bad() if config.is_bad else Good())", "*(Bad() if config.is_bad else Good())"),
        ("self.b = A(config.text_config)", "config.text_config.fn"),
    ],
)
def test_an_attribute_of_what_is_handed_is_told_or_unknown(code: str, value: str):
    anatomy = anatomy_of(f"{OF_PARAMETER}        {code}\n")
    values = told(anatomy.handed("A", anatomy.attribute("A", "act")))
    assert "nn.SiLU()" in values
    assert value in values
