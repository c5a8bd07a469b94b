"""Which names hold the embeddings of tokens is what is looked up and where it goes, whatever the names are."""

from __future__ import annotations

import textwrap

import pytest
from generation_cases import anatomy_of, edited, load

from patchgen import source
from patchgen.anatomy import study
from patchgen.anatomy.embeddings import Embeddings
from patchgen.passes.dummy_forward import DummyForward

MODEL = """
class Table(nn.Embedding):
    pass

class Words(nn.Module):
    def __init__(self, config):
        self.table = Table(8, 8)

class Example(PreTrainedModel):
    def __init__(self, config):
        self.words = Words(config)
        self.drop = nn.Dropout(0.1)
        self.proj = nn.Linear(8, 4)

    def embed(self, ids):
        return self.words(ids) * 2

    def mask(self, ids, x):
        return (ids == 3).unsqueeze(-1).expand_as(x)

    def forward(self, input_ids=None, inputs_embeds=None, pixels=None):
"""
GIVEN = "x = self.words(input_ids) if inputs_embeds is None else inputs_embeds"


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("x = self.words(input_ids)", ["x"]),
        ("x = self.get_input_embeddings()(torch.where(input_ids < 0, 0, input_ids))", ["x"]),
        ("x = self.embed(input_ids)", ["x"]),
        (GIVEN, ["x"]),
        (f"{GIVEN}\ny = self.drop(x)", ["x", "y"]),
        (f"{GIVEN}\ny = x.to(pixels.dtype)\nx = x.masked_scatter(pixels > 0, pixels)", ["y", "x"]),
        (f"{GIVEN}\nx = torch.where(pixels > 0, pixels, x)", ["x"]),
        ("if inputs_embeds is None:\n    x = self.words(input_ids)\nelse:\n    x = inputs_embeds", ["x"]),
        ("if inputs_embeds is None:\n    x = self.words(input_ids)", []),  # not bound where they are handed in
        ("if inputs_embeds is None:\n    inputs_embeds = self.words(input_ids)", ["inputs_embeds"]),
        ("hidden_states = self.proj(pixels)", []),  # a name that says nothing
        (f"{GIVEN}\nhidden_states = pixels.to(x.dtype)\nmask = self.mask(input_ids, x)", ["x"]),
        (f"{GIVEN}\ninputs_embeds = x.mean(1)", ["x"]),
        (f"{GIVEN}\nscores = self.proj(x)", ["x"]),
        ("x = self.proj(inputs_embeds)", ["x"]),  # what its layers take, if nothing else is bound
        ("x = self.proj(input_ids)", []),
        ("x = self.words(pixels)", []),
    ],
)
def test_embeddings_are_what_a_table_gives_for_the_ids_or_callers_hand_in(code: str, names: list[str]):
    anatomy = anatomy_of(MODEL + textwrap.indent(f"{code}\n", " " * 8))
    forward = anatomy.classes["Example"].methods["forward"]
    assert Embeddings(anatomy, "Example").above(forward, forward.body) == names


def test_a_tower_enters_renamed_embeddings():
    """Llava with another name for its embeddings, and one of the usual names for its pixels."""
    origin = load("llava")
    lookup = "        if inputs_embeds is None:\n            inputs_embeds = self.get_input_embeddings()(input_ids)\n"
    start, end = origin.text.index(lookup), origin.text.index("        return LlavaModelOutputWithPast(\n")
    renamed = origin.text[start + len(lookup) : end].replace("inputs_embeds", "tokens")
    renamed = renamed.replace("tokens=tokens", "inputs_embeds=tokens")
    above = GIVEN.replace("x =", "tokens =").replace("self.words", "self.get_input_embeddings()")
    origin = edited(
        origin, (origin.text[start:end], f"        {above}\n        hidden_states = pixel_values\n{renamed}")
    )
    module = source.parse(origin.text, origin.path)
    text = DummyForward().apply(module, study(module, origin)).module.text
    assert "tokens = ops.absent_tower(tokens, pixel_values, self.get_image_features)" in text
