"""What a file takes from other models' files, and which of its code uses it."""

from __future__ import annotations

import pytest
from generation_cases import written

from patchgen import source
from patchgen.anatomy import study
from patchgen.anatomy.imported import auto_classes_in, imported_code
from patchgen.upstream import open_release

FILE = """
from torch import nn
from ...activations import ACT2FN
from ..auto import AutoModel
from ..llama.configuration_llama import LlamaConfig
from ..llama.modeling_llama import LlamaMLP as Dense, LlamaRMSNorm, LlamaRotaryEmbedding, logger, repeat_kv
from ..not_a_model.modeling_not_a_model import Nothing
from .parts import Part, NOT_A_CLASS
from .broken import Broken

class First(nn.Module):
    def forward(self, x):
        return Dense(LlamaConfig())(x) + Part()(x) + Broken() + ACT2FN["gelu"](x) + NOT_A_CLASS + logger.level

class Second(nn.Module):
    def forward(self, x):
        return AutoModel(Dense()(repeat_kv(x, 2)))

def third(x):
    return LlamaRMSNorm(Nothing(x))
"""
SIBLINGS = {"parts.py": "NOT_A_CLASS = 1\nclass Part: pass\n", "broken.py": "class Broken(:\n"}
LLAMA = "transformers.models.llama.modeling_llama"
HERE = "transformers.models.example"


def found(**siblings: str) -> dict[str, tuple]:
    origin = written(FILE, siblings=SIBLINGS | siblings, release=open_release())
    module = source.parse(origin.text, origin.path)
    return {one.name: (one.users, one.module, one.anatomy) for one in imported_code(study(module, origin), module)}


def test_classes_and_functions_of_models_with_those_who_use_them():
    assert {name: (users, module) for name, (users, module, _) in found().items()} == {
        "LlamaMLP": (("First", "Second"), LLAMA),
        "LlamaRMSNorm": (("third",), LLAMA),
        "repeat_kv": (("Second",), LLAMA),
        "Nothing": (("third",), "transformers.models.not_a_model.modeling_not_a_model"),
        "Part": (("First",), f"{HERE}.parts"),
        "Broken": (("First",), f"{HERE}.broken"),
    }


@pytest.mark.parametrize(
    ("name", "known"), [("LlamaMLP", True), ("Part", True), ("Nothing", False), ("Broken", False)]
)
def test_the_other_file_is_read_where_it_can_be(name: str, known: bool):
    anatomy = found()[name][2]
    assert (anatomy is not None) is known
    if known:
        assert name in anatomy.classes


def test_who_is_no_longer_in_the_file_uses_nothing():
    origin = written(FILE, siblings=SIBLINGS, release=open_release())
    module = source.parse(origin.text, origin.path)
    left = source.parse(origin.text.replace("class First", "class Gone", 1), origin.path)
    users = {one.name: one.users for one in imported_code(study(module, origin), left)}
    assert users["LlamaMLP"] == ("Second",) and "Part" not in users


PARTS_ON = """
from torch import nn
from . import parts
from .passing import Part, Round
from .parts import make_tower
from . import tables

class First(nn.Module):
    def forward(self, x):
        return parts.Part()(x) + parts.CONSTANT + Part()(x) + Round()(x) + getattr(tables, x.name)

class Second(nn.Module):
    def forward(self, x):
        return parts.helper(make_tower(x))
"""
CHAIN = {
    "parts.py": "import transformers\nfrom .further import build\nCONSTANT = 1\nclass Part: pass\ndef helper(x): return x\n"
    "def make_tower(config): return build(config)\n",
    "passing.py": "from .parts import Part\nfrom .circle import Round\n",
    "circle.py": "from .passing import Round\n",
    "tables.py": "",
    "make_tower.py": "def something_else(): ...\n",  # no module of `make_tower`, which is of another
    "further.py": "from transformers import AutoModel as Tower\ndef build(config): return Inner(config)\n"
    "class Inner:\n    def __new__(cls, config): return Tower.from_config(config)\n",
}


def test_code_of_a_module_and_code_that_files_pass_on_is_found_where_it_is_defined():
    origin = written(PARTS_ON, siblings=CHAIN, release=open_release())
    module = source.parse(origin.text, origin.path)
    parts = {(part.name, part.module, part.users) for part in imported_code(study(module, origin), module)}
    assert parts == {
        ("Part", f"{HERE}.parts", ("First",)),
        ("helper", f"{HERE}.parts", ("Second",)),
        ("make_tower", f"{HERE}.parts", ("Second",)),
        ("tables", HERE, ("First",)),  # whose members are not told
    }


def test_auto_classes_are_found_through_all_that_an_imported_function_names():
    origin = written(PARTS_ON, siblings=CHAIN, release=open_release())
    module = source.parse(origin.text, origin.path)
    autos = {part.name: auto_classes_in(part) for part in imported_code(study(module, origin), module)}
    assert autos == {"Part": set(), "helper": set(), "make_tower": {"AutoModel"}, "tables": set()}
