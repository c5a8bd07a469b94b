"""Inheritance, what attributes may hold, who builds whom, and which classes are reached."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

from patchgen import source
from patchgen.anatomy.graph import references
from patchgen.upstream import ConfigClass, SubConfig

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
        ("Inner", "run", []),  # another class has it in its body
        ("Outer", "run", []),
        ("Outer", "two_of", ["two_of"]),
        ("Outer", "outside", []),
    ],
)
def test_what_an_attribute_may_hold(owner: str, attribute: str, values: list[str]):
    assert told(ANATOMY.held(owner, attribute)) == values


@pytest.mark.parametrize(
    ("owner", "parameter", "values"),
    [
        ("Inner", "act", ["nn.SiLU()", "nn.Sigmoid()", "nn.ReLU()", "nn.GELU()"]),  # a subclass hands it on
        ("Inner", "last", ["None", "self"]),
        ("Inner", "config", ["Sizes()", "config", "config", "config"]),
        ("Inner", "config.width", ["8"]),
        ("Inner", "config.height", []),
        ("Inner", "unknown", []),
        ("Inner", "1", []),
        ("Outer", "config", []),
        ("Alone", "config", []),
    ],
)
def test_what_a_parameter_is_where_the_class_is_built(owner: str, parameter: str, values: list[str]):
    assert told(ANATOMY.handed(owner, ast.parse(parameter, mode="eval").body)) == values


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


STORES = {
    "a computed name": "def change(m, name):\n    setattr(m, name, nn.Softmax(1))",
    "taken away": "def change(other):\n    del other.act",
    "a name made of parts": "def change(m, kind):\n    setattr(m, f'{kind}ct', nn.Softmax(1))",
    "a part in a name": "def change(m, kind):\n    first = 'a'\n    setattr(m, first + kind, nn.Softmax(1))",
    "object": "def change(m):\n    object.__setattr__(m, 'act', nn.Softmax(1))",
    "another's method": "def change(m):\n    m.__setattr__('act', nn.Softmax(1))",
    "a dictionary": "def change(m):\n    m.__dict__['act'] = nn.Softmax(1)",
    "a dictionary by vars": "def change(m):\n    vars(m)['act'] = nn.Softmax(1)",
    "a dictionary that is updated": "def change(m):\n    m.__dict__.update(act=nn.Softmax(1))",
    "another name of it": "def change(m):\n    modules = m._modules\n    modules['act'] = nn.Softmax(1)",
    "the modules": "def change(m):\n    m._modules['act'] = nn.Softmax(1)",
    "a module": "def change(m):\n    m.register_module('act', nn.Softmax(1))",
    "a module by name": "def change(m):\n    m.add_module(module=nn.Softmax(1), name='act')",
    "a method of torch's class": "def change(m):\n    nn.Module.add_module(m, 'act', nn.Softmax(1))",
    "a module below": "def change(m):\n    m.set_submodule('experts.act', nn.Softmax(1))",
    "a function that is put into a class": "def change(self):\n    self.act = nn.Softmax(1)\nPart.forward = change",
    "the module's code": "setattr(Part, 'act', nn.Softmax(1))",
    "a subclass's body": "class Below(Part):\n    act: nn.Module = nn.Softmax(1)",
    "a mixin": "class Mixin:\n    def mix(self):\n        self.act = nn.Softmax(1)\nclass Both(Mixin, Part): pass",
} | {
    f"on self: {code}": f"class Below(Part):\n    def change(self, name):\n        {code}"
    for code in (
        "setattr(self, name, nn.Softmax(1))",
        "self.register_module('act', nn.Softmax(1))",
        "self.add_module('act', nn.Softmax(1))",
        "self._modules['act'] = nn.Softmax(1)",
        "self.__dict__ = name",
        "super().__setattr__('act', nn.Softmax(1))",
        "for self.act in name: pass",
    )
}  # fmt: skip
HOLDER = "class Part(nn.Module):\n    def __init__(self):\n        self.act = nn.SiLU()\n"


@pytest.mark.parametrize("case", STORES)
def test_an_attribute_that_other_code_may_store_is_unread(case: str):
    assert told(anatomy_of(HOLDER).held("Part", "act")) == ["nn.SiLU()"]
    assert told(anatomy_of(f"{HOLDER}{STORES[case]}\n").held("Part", "act")) in ([], ["nn.SiLU()", "nn.Softmax(1)"])


@pytest.mark.parametrize(
    "code",
    [
        "def change(m, kind):\n    setattr(m, f'{kind}_norm', nn.Softmax(1))",
        "class Other:\n    def change(self, name):\n        setattr(self, name, nn.Softmax(1))",
        "def change(m):\n    return m._modules['act'], m.__dict__.items()",
    ],
)
def test_a_store_that_cannot_be_to_the_attribute_says_nothing_of_it(code: str):
    assert told(anatomy_of(f"{HOLDER}{code}\n").held("Part", "act")) == ["nn.SiLU()"]


SETTER = "\n    def set_act(self, act):\n        self.act = act\n"


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("class Use:\n    def set_act(self, act):\n        self.part.set_act(act)", ["nn.SiLU()"]),  # for who asks for it
        ("class Use:\n    def resize(self, part):\n        part.set_act(nn.Softmax(1))", ["nn.SiLU()", "act"]),
        ("class Use:\n    def _init_weights(self, m):\n        m.set_act(nn.Softmax(1))", ["nn.SiLU()", "act"]),
        ("class Use:\n    @property\n    def ready(self):\n        self.part.set_act(nn.Softmax(1))", ["nn.SiLU()", "act"]),
        ("class Use:\n    def forward(self, x):\n        run = self.part.set_act\n        run(x)", ["nn.SiLU()", "act"]),
        ("class Use:\n    def forward(self, x):\n        getattr(self.part, 'set_act')(x)", ["nn.SiLU()", "act"]),
        ("class Use:\n    def __init__(self, part):\n        part.set_act(nn.Softmax(1))", ["nn.SiLU()", "act"]),
        ("def change(m):\n    m.set_act(nn.Softmax(1))\nclass Use:\n    def forward(self, x):\n        change(self.part)", ["nn.SiLU()", "act"]),
    ],
)  # fmt: skip
def test_a_setter_that_the_file_names_counts(code: str, values: list[str]):
    assert told(anatomy_of(f"{HOLDER}{SETTER}{code}\n").held("Part", "act")) == values


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
        ("Part(config) for config in config.parts] or [0", None),
        ("Part(config) if config.a else Part(config.text_config)", None),
        ("nn.Linear(8, 8)", None),
        ("(lambda config: Part(config))(config.text_config)", None),
        ("self.make(config.text_config)])\n    def make(self, config):\n        return ([Part(config)", None),
    ],
)
def test_a_part_without_annotation_has_the_config_of_the_model_that_builds_it(built: str, target: str | None):
    anatomy = anatomy_of(PART.replace("{built}", built), configs=CONFIGS)
    assert [anatomy.target_of(build) for build in anatomy.auto_builds("Part")] == [target]


@pytest.mark.parametrize(
    ("kept", "heir", "target"),
    [
        ("self.config = config", "", "TextModel"),
        ("self.config = config.other_config", "", None),
        ("config.text_config, self.config = config, 1", "", None),
        ("setattr(self, 'config', config.other_config)", "", None),
        ("pass", "self.config = config.other_config", None),
        ("pass", "self.config = config", "TextModel"),
        ("super().__init__(config)", "", "TextModel"),
        ("super().__init__(config.text_config)", "", None),
        ("super().__init__(config=config.text_config)", "", None),
        ("super().__init__(**config)", "", None),
        ("pass", "super().__init__(config.other_config)", None),
    ],
)
def test_the_config_that_a_model_keeps_is_its_own_unless_it_keeps_another(kept: str, heir: str, target: str | None):
    model = f"class Model(PreTrainedModel):\n    config: Config\n    def __init__(self, config):\n        {kept}\n"
    model += "        self.part = Part(self.config)\n"
    model += f"class Heir(Model):\n    def __init__(self, config):\n        {heir}\n" if heir else ""
    anatomy = anatomy_of(f"{PART[: PART.index('class Model')]}{model}", configs=CONFIGS)
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
    assert [anatomy.target_of(build) for build in anatomy.auto_builds("Part")] == [target]


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
    """Also where it was read before: what the class of a changed attribute is handed, and what other code stores."""
    part = "class {0}(nn.Module):\n    def __init__(self, act):\n        self.act = act\n"
    model = "class Model(nn.Module):\n    def __init__(self):\n        self.part = {0}\n"
    anatomy = anatomy_of(f"{part.format('A')}{model.format('A(nn.SiLU())')}")
    (act,) = anatomy.held("A", "act")
    assert told(anatomy.handed("A", act)) == ["nn.SiLU()"]
    new = f"{part.format('A')}{part.format('New')}        self.part.other = act\n{model.format('New(nn.Tanh())')}"
    anatomy.add("New", source.parse(f"from torch import nn\n{new}", "x.py"))
    (act,) = anatomy.held("New", "act")
    assert told(anatomy.handed("New", act)) == ["nn.Tanh()"]
    assert anatomy.is_stored_outside("other")
