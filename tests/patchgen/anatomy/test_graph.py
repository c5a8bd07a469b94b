"""Inheritance, what attributes may hold, who builds whom, and which classes are reached."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

from patchgen import source
from patchgen.anatomy.graph import references
from patchgen.config_classes import ConfigClass, SubConfig

FILE = """
from torch import nn
from ..auto import AutoModel
from ...modeling_utils import PreTrainedModel as Base

TABLE = {"a": InTable}

class Sizes:
    def __init__(self):
        self.width = 8

class Inner(nn.Module):
    def __init__(self, config, act, last=None):
        self.act = act
        self.width = config.width
        self.last = last

    def run(self, x):
        return x

class Below(Inner):
    def __init__(self, config):
        super().__init__(config, nn.GELU())
        self.act = nn.Tanh()

    def reset(self):
        self.extra = 2

class Outer(nn.Module):
    def __init__(self, config):
        self.one = Inner(Sizes(), nn.SiLU())
        self.two = nn.ModuleList([Inner(act=nn.ReLU(), config=config, last=self)])
        self.two.outside = 3
        local = Inner(config, nn.Sigmoid())

    def two_of(self):
        self.run = 1

class InTable(nn.Module):
    named = 1

class Alone(nn.Module):
    run = Sizes

    def call(self, other: "Quoted", kind) -> "Returned":
        return other, kind["ByKey"], TABLE

class Quoted: pass
class Returned: pass
class ByKey: pass

class TextModel(Base):
    config: "TextConfig"

class OtherModel(Base):
    def __init__(self, config: VisionConfig):
        self.part = Quoted()

class Model(Base):
    config: Config

    def __init__(self, config):
        super().__init__(config)
        self.text = AutoModel.from_config(config.text_config)
        self.same = AutoModel.from_config(self.config.get_text_config(decoder=True))
        self.vision = AutoModel.from_config(config.vision_config)
        self.any = AutoModel.from_config(config.any_config)
        self.foreign = AutoModel.from_config(config.foreign_config)
        self.unknown = AutoModel.from_config(config.nothing)
        self.other = AutoModel.from_config(settings)

class Head(Model):
    pass
"""
SUBS = {
    "text_config": SubConfig("TextConfig"),
    "vision_config": SubConfig("VisionConfig"),
    "any_config": SubConfig("AutoConfig"),
    "foreign_config": SubConfig("ForeignConfig"),
}
CONFIGS = {
    "Config": ConfigClass("Config", "example", SUBS),
    "TextConfig": ConfigClass("TextConfig", "example_text"),
    "VisionConfig": ConfigClass("VisionConfig", "example_vision"),
}
ANATOMY = anatomy_of(FILE, configs=CONFIGS)


def told(values) -> list[str]:
    return [value.name if isinstance(value, ast.FunctionDef) else ast.unparse(value) for value in values]


def test_a_class_comes_before_its_ancestors():
    assert [info.name for info in ANATOMY.lineage("Below")] == ["Below", "Inner"]
    assert ANATOMY.is_a(ast.Name("Below"), "torch.nn.Module") and not ANATOMY.inherits("Below", "Module")
    assert ANATOMY.method("Below", "run")[0].name == "Inner" and ANATOMY.method("Below", "walk") is None
    assert ast.unparse(ANATOMY.attribute("Below", "act")) == "nn.Tanh()"
    assert (
        ast.unparse(ANATOMY.attribute("Below", "width")) == "config.width" and ANATOMY.attribute("Below", "x") is None
    )
    assert {name for name in ANATOMY.classes if ANATOMY.is_model(name)} == {"TextModel", "OtherModel", "Model", "Head"}


@pytest.mark.parametrize(
    ("owner", "attribute", "values"),
    [
        ("Inner", "act", ["act", "nn.Tanh()"]),  # an instance of a subclass runs the class's code too
        ("Below", "act", ["nn.Tanh()", "act"]),
        ("Inner", "extra", ["2"]),
        ("Below", "width", ["config.width"]),
        ("Inner", "nothing", []),
        ("Inner", "run", ["run"]),
        ("Outer", "run", ["1"]),
        ("Outer", "two_of", ["two_of"]),
        ("Outer", "outside", []),
    ],
)
def test_what_an_attribute_may_hold(owner: str, attribute: str, values: list[str]):
    assert told(ANATOMY.held(owner, attribute)) == values


DIAMOND = """
class D: pass
class B(D): pass
class C(D): pass
class Q(B, C): pass
class Twice(Q): pass
class Twice(Twice): pass
class Refused(D, B): pass
class Mixed(Elsewhere, C, nn.Module, D): pass
"""


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("Q", "Q B C D"),
        ("Twice", "Twice"),
        ("Refused", "Refused D B"),  # Python makes no such class
        ("Mixed", "Mixed C D"),
        ("Elsewhere", ""),
    ],
)
def test_ancestors_stand_in_pythons_order(name: str, order: str):
    assert [info.name for info in anatomy_of(DIAMOND).lineage(name)] == order.split()


def test_configurations_by_annotation():
    names = ("TextModel", "OtherModel", "Model", "Head", "Inner")
    assert [ANATOMY.config_of(name) for name in names] == ["TextConfig", "VisionConfig", "Config", "Config", None]
    assert ANATOMY.model_type_of("Head") == "example" and ANATOMY.model_type_of("Inner") is None


def test_what_an_auto_class_builds_by_default():
    built = {build.attribute: ANATOMY.target_of(build) for build in ANATOMY.auto_builds("Head")}
    assert built == {
        "text": "TextModel",
        "same": "TextModel",
        "vision": "OtherModel",
        "any": "AutoConfig",
        "foreign": "ForeignConfig",
        "unknown": None,
        "other": None,
    }
    assert {ANATOMY.target_of(build) for build in ANATOMY.builds("OtherModel")} == {"Quoted"}
    assert [build.attribute for build in ANATOMY.builds("Below")] == []


PART = """
from torch import nn
from ..auto import AutoModel
from ...modeling_utils import PreTrainedModel

class Part(nn.Module):
    def __init__(self, config, width=8):
        self.text = AutoModel.from_config(config.text_config)

class TextModel(PreTrainedModel):
    config: TextConfig

class Model(PreTrainedModel):
    config: Config
    def __init__(self, config):
        self.parts = nn.ModuleList([{built} for _ in range(2)])
"""


@pytest.mark.parametrize(
    ("built", "target"),
    [
        ("Part(config)", "TextModel"),
        ("Part(width=4, config=self.config)", "TextModel"),
        ("Part(config.text_config)", None),
        ("Part(config) if config.a else Part(config.text_config)", None),
        ("nn.Linear(8, 8)", None),
    ],
)
def test_a_part_without_annotation_has_the_config_of_the_model_that_builds_it(built: str, target: str | None):
    anatomy = anatomy_of(PART.replace("{built}", built), configs=CONFIGS)
    assert [anatomy.target_of(build) for build in anatomy.auto_builds("Part")] == [target]


@pytest.mark.parametrize(
    ("code", "target"),
    [
        ("pass", "TextModel"),
        ("config = config.other_config", None),
        ("config = copy.deepcopy(config)", None),
        ("self.first = AutoModel.from_config(config.text_config)\n        config = config.vision_config", None),
    ],
)
def test_a_config_that_the_init_replaces_does_not_say_what_is_built(code: str, target: str | None):
    model = f"class Model(PreTrainedModel):\n    config: Config\n    def __init__(self, config):\n        {code}\n"
    model += "        self.text = AutoModel.from_config(config.text_config)\n        self.part = Part(config)\n"
    anatomy = anatomy_of(f"import copy\n{PART[: PART.index('class Model')]}{model}", configs=CONFIGS)
    assert [anatomy.target_of(b) for b in anatomy.auto_builds("Model") if b.attribute == "text"] == [target]


@pytest.mark.parametrize(
    ("made", "target"),
    [
        ("Config()", "TextModel"),
        ("Config() if config is None else config", "TextModel"),
        ("config or Config()", "TextModel"),
        ("OtherConfig()", None),
        ("OtherConfig() if config is None else config", None),
        ("config or OtherConfig()", None),
        ("config or config.text_config", None),
    ],
)
def test_a_new_config_of_the_annotated_class_says_the_same(made: str, target: str | None):
    model = f"class Model(PreTrainedModel):\n    def __init__(self, config: Config = None):\n        if config is None:\n            config = {made}\n"
    model += "        self.text = AutoModel.from_config(config.text_config)\n        if config is None:\n            config = Config()\n"
    imports = "from .configuration import Config, OtherConfig\n"
    anatomy = anatomy_of(f"{imports}{PART[: PART.index('class Model')]}{model}", configs=CONFIGS)
    assert [anatomy.target_of(b) for b in anatomy.auto_builds("Model")] == [target]


def test_what_is_reached_by_name():
    assert ANATOMY.reached_from(["Alone"]) == {"Alone", "Quoted", "Returned", "ByKey", "Sizes", "InTable"}
    assert ANATOMY.reached_from(["Head"]) == {"Head", "Model", "TextModel", "OtherModel", "Quoted"}
    assert ANATOMY.reached_from(["Head"], without=["OtherModel"]) == {"Head", "Model", "TextModel"}
    assert ANATOMY.reached_from(["NotHere"]) == set()


def test_names_in_strings_count_where_they_are_types_or_keys():
    code = ast.parse(
        "def f(a: 'A | b.B', c: C = 'd') -> 'E':\n    return g['H'], k['not a name'], 'l', m[1]\nn: 'no name('"
    )
    assert references(code) == {"A", "b", "C", "E", "g", "H", "k", "m", "n"}


def test_what_a_pass_adds_counts_in_all_that_is_read_of_the_file():
    """Also where it was read before."""
    part = "class {0}(nn.Module):\n    def __init__(self, act):\n        self.act = act\n"
    model = "class Model(nn.Module):\n    def __init__(self):\n        self.part = {0}\n"
    anatomy = anatomy_of(f"{part.format('A')}{model.format('A(nn.SiLU())')}")
    assert [build.target for build in anatomy.builds("Model")] == ["A"]
    new = f"{part.format('A')}{part.format('New')}{model.format('New(nn.Tanh())')}"
    anatomy.add("New", source.parse(f"from torch import nn\n{new}", "x.py"))
    assert told(anatomy.held("New", "act")) == ["act"]
    assert [build.target for build in anatomy.builds("Model")] == ["New"]
