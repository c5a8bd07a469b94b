"""A name means what the scope around it binds, and a class what it was imported as; neither is told by its spelling."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of, applied

from patchgen.anatomy import Role
from patchgen.passes.fused_ops import FusedOps
from patchgen.passes.language_sp import LanguageSP
from patchgen.passes.mixer_sp import MixerSP

LAYERS = """
from torch import nn
from torch.nn import Linear as Dense
from .parts import Conv1d, Embedding, Linear, Parameter

class OwnLinear(nn.Linear):
    pass

class Layer(nn.Module):
    def __init__(self, config):
        from torch.nn import Linear as Local
        from .parts import layers as torch
        self.plain, self.dense, self.own, self.local = 1, 2, 3, 4
        self.a = nn.Linear(8, 8)
        self.b = Dense(8, 8)
        self.c = OwnLinear(8, 8)
        self.d = Local(8, 8)
        self.e = Linear(8, 8)
        self.f = torch.nn.Linear(8, 8)

    def later(self, nn):
        return nn.Linear(8, 8)
"""


def test_a_class_is_what_it_is_imported_as():
    anatomy = anatomy_of(LAYERS)
    is_linear = {name: anatomy.is_a(v, "torch.nn.Linear") for name, v in anatomy.classes["Layer"].built.items()}
    assert is_linear == {"a": True, "b": True, "c": True, "d": True, "e": False, "f": False}
    (returned,) = [n for n in ast.walk(anatomy.classes["Layer"].methods["later"]) if isinstance(n, ast.Return)]
    assert anatomy.names.resolve(returned.value.func) is None


@pytest.mark.parametrize(
    ("edit", "role"),
    [
        (("class Base(PreTrainedModel)", "class Base(PreTrainedModel)"), True),
        (("from transformers import", "from .parts import"), True),  # a file beside this one follows the same custom
        (("from transformers import", "from elsewhere import"), False),
        (("from transformers import PreTrainedModel", "class PreTrainedModel: ..."), False),
    ],
)
def test_a_model_is_transformers_own(edit: tuple[str, str], role: bool):
    text = "from transformers import PreTrainedModel\n\nclass Base(PreTrainedModel):\n    pass\n"
    assert anatomy_of(text.replace(*edit)).is_model("Base") is role


NORM = FusedOps.EXAMPLES[0].before
WEIGHT = "nn.Parameter(torch.ones(hidden_size))"


@pytest.mark.parametrize(
    "edit",
    [
        (WEIGHT, "nn.Parameter(torch.ones(1))"),
        (WEIGHT, "nn.Parameter(torch.ones((1,)))"),
        (WEIGHT, "nn.Parameter(torch.ones(2 - 1))"),
        (WEIGHT, "nn.Parameter(torch.ones((one := 1)))"),
        (WEIGHT, "nn.Parameter(torch.ones(1, hidden_size))"),
        (WEIGHT, "nn.Parameter(torch.ones(hidden_size).view(1, -1))"),
        (WEIGHT, "nn.Parameter(torch.ones(hidden_size, hidden_size))"),
        (WEIGHT, "Parameter(torch.ones(hidden_size))"),
        (WEIGHT, "config.weight"),
    ],
)  # fmt: skip
def test_a_norm_with_another_weight_is_left_with_a_note(edit: tuple[str, str]):
    assert edit[0] in NORM
    outcome = applied(FusedOps(), NORM.replace(*edit))
    assert not outcome.hits and "left as it is" in outcome.notes[0]


def test_a_norm_whose_size_a_constant_of_the_module_says_is_left_with_a_note():
    outcome = applied(FusedOps(), NORM.replace(WEIGHT, "nn.Parameter(torch.ones(max(ONE, 1)))") + "\n\nONE = 1\n")
    assert not outcome.hits and "left as it is" in outcome.notes[0]


def test_a_norm_of_a_size_that_is_handed_in_keeps_its_seam():
    built = "\n\nclass Use:\n    def __init__(self, config):\n        self.n = ExampleRMSNorm(config.size, eps=config.eps)\n"
    assert applied(FusedOps(), NORM + built).hits
    assert applied(FusedOps(), NORM.replace("eps=1e-6", "eps: float")).hits


def test_convolutions_and_embeddings_are_torchs():
    mixer = MixerSP.EXAMPLES[0].before
    for imported, is_mixer in (("from torch import nn\n", True), ("from .parts import nn\n", False)):
        anatomy = anatomy_of(f"import torch.nn.functional as F\n{imported}{mixer}")
        assert (Role.MIXER in anatomy.classes["ExampleShortConv"].roles) is is_mixer


def test_positions_are_looked_up_in_torchs_table():
    text = LanguageSP.EXAMPLES[0].before.replace("position_ids=None, ", "").replace("position_ids", "places")
    table = "self.table = nn.Embedding(config.max_position_embeddings, 8)\n        self.layers"
    text = text.replace("self.layers", table, 1).replace(
        "hidden_states = inputs", "x = self.table(places)\n        hidden_states = inputs"
    )
    counted = applied(LanguageSP(), f"from torch import nn\n{text}")
    assert 'ops.require_whole_sequence("the positions of Example' in counted.module.block("ExampleModel").text
    assert not applied(LanguageSP(), f"import torch\nfrom .parts import nn\n{text}").hits
    unnamed = text.replace("config.max_position_embeddings", "config.length")  # by what is looked up in it
    assert applied(LanguageSP(), f"from torch import nn\n{unnamed}").hits
    assert not applied(LanguageSP(), f"from torch import nn\nfrom .parts import torch\n{unnamed}").hits
