"""What one class builds and stores, as its code says."""

from __future__ import annotations

import ast
import textwrap

import pytest

from patchgen.anatomy import classes
from patchgen.anatomy.classes import Build, auto_builds, describe, stores_of
from patchgen.anatomy.names import Names

SOURCE = """
class Model(Base, nn.Module):
    config: "Config"
    limit = 3

    def __init__(self, config):
        super().__init__()
        self.tower = Tower._from_config(config.tower)
        self.one, self.two = Part(config), 2
        self.parts = nn.ModuleList([Part(config=config.part) for _ in range(3)])
        self.by_name: nn.ModuleDict = nn.ModuleDict({"a": Part(config)})
        self.steps = nn.Sequential(Part(), nn.Linear(8, 8))
        part = Part(config)
        self.size = config.size
        self.size = 7
        if use(Part(config)):
            self.head = nn.Linear(8, 8) if config.tied else None
        return Part(config)

    def lazily(self, kind):
        chosen = config.get_text_config()
        self.language = AutoModel.from_config(chosen, dtype=None)
        self.others = nn.ModuleList(AnyModel.from_config(config=c) for c in self.kinds)
        if AutoModel.from_config(kind) or AutoModel.from_pretrained(kind):
            self.size += 1
        self.part.size = 2
        self.table["part"] = 3
        self.one: Part = kind

    def set_head(self, new):
        self.head = new

    def set_and_forward(self, new):
        self.part = new
        return self.forward(new)
"""
TREE = ast.parse(SOURCE).body[0]
CLASSES = "class Part: ...\nclass Tower: ...\n"
NAMES = Names(
    ast.parse(
        f"from torch import nn\nfrom transformers import AutoModel, AutoModelForCausalLM as AnyModel\n{CLASSES}"
    ).body
)
INFO = describe(TREE, {"Part", "Tower"}, NAMES.resolve)


def test_bases_methods_annotations_and_first_values():
    assert INFO.bases == ("Base", "nn.Module")
    assert list(INFO.methods) == ["__init__", "lazily", "set_head", "set_and_forward"]
    assert INFO.annotations == {"config": "Config"}
    assert ast.unparse(INFO.attributes["size"]) == "config.size"
    assert set(INFO.built) == {"tower", "parts", "by_name", "steps"}


def test_what_init_builds_of_the_files_classes():
    def build(attribute: str | None, target: str, in_list: bool = False) -> Build:
        return Build("Model", attribute, target, in_list=in_list)

    assert INFO.builds == [
        build("tower", "Tower"),
        build(None, "Part"),
        build("parts", "Part", in_list=True),
        build("by_name", "Part", in_list=True),
        build("steps", "Part", in_list=True),
        build(None, "Part"),
        build(None, "Part"),
        build(None, "Part"),
    ]


def test_what_any_method_builds_through_auto_classes():
    found = auto_builds(INFO, NAMES.resolve)
    told = [(b.attribute, b.config, b.auto_class, b.in_list, b.method) for b in found]
    assert told == [
        ("language", "config.get_text_config()", "AutoModel", False, "lazily"),
        ("others", "c", "AutoModelForCausalLM", True, "lazily"),
        (None, "kind", "AutoModel", False, "lazily"),
    ]
    assert found[0].code == "AutoModel.from_config(chosen, dtype=None)"


@pytest.mark.parametrize(
    ("imports", "known"),
    [
        ("from transformers import AutoModel, AutoModel as AnyModel", 3),
        (
            "from transformers.models.auto.modeling_auto import AutoModel\nfrom transformers.models.auto import AutoModel as AnyModel",
            3,
        ),
        ("from .parts import AutoModel\nfrom elsewhere import AutoModelForCausalLM as AnyModel", 0),
        ("from transformers.models.example import AutoModel\nfrom transformers import AutoConfig as AnyModel", 0),
        ("class AutoModel: ...\nclass AnyModel: ...", 0),
        ("from transformers import AutoModel\nif AutoModel:\n    from .parts import AutoModel", 0),
    ],
)
def test_an_auto_class_is_transformers_own(imports: str, known: int):
    resolve = Names(ast.parse(imports).body, lambda level: ["transformers", "models", "example"]).resolve
    assert len(auto_builds(INFO, resolve)) == known


@pytest.mark.parametrize(
    ("attribute", "values"),
    [
        ("size", ["config.size", "7", "self.size += 1"]),
        ("head", ["nn.Linear(8, 8)", "None"]),
        ("one", ["self.one, self.two = (Part(config), 2)", "kind"]),
        ("part", ["self.part.size = 2"]),
        ("table", ["self.table['part'] = 3"]),
        ("limit", []),
    ],
)
def test_every_value_of_an_attribute_but_those_of_setters(attribute: str, values: list[str]):
    assert [ast.unparse(value) for value in stores_of(INFO, attribute)] == values


def test_names_of_expressions():
    names = {
        "a": "a",
        "a.b.c": "a.b.c",
        "a[0].b": "a.b",
        "f(x).b": "f.b",
        "'a'.b": "b",
        "1 + a": "",
        "super().f": "super.f",
    }
    assert {code: classes.dotted(ast.parse(code, mode="eval").body) for code in names} == names
    function = ast.parse(
        textwrap.dedent("def f(self, a, /, b, *, c=g(x).h()):\n    d = e\n    del i\n    self.k = a")
    ).body[0]
    assert classes.parameter_names(function) == ["a", "b", "c"]
    assert classes.called_names(function) == {"g", "h"}
    assert classes.stored(function) == ["d", "i"]
    assert sorted(classes.loaded(function)) == ["a", "e", "g", "self", "x"]
    assert classes.mentions(function, "e") and not classes.mentions(function, "f")
    assert classes.own_attribute(function.body[2].targets[0]) == "k"
    assert classes.own_attribute(ast.parse("other.k", mode="eval").body) is None


def test_the_last_plain_value_of_a_name():
    nodes = ast.parse("a = 1\nb, c = 2, 3\na = 4\nd: int = 5\nself.e = 6\nf = g = 7").body
    assert {name: value.value for name, value in classes.plain_assignments(nodes).items()} == {"a": 4, "f": 7}
