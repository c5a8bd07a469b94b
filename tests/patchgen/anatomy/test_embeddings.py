"""Which names hold the embeddings of tokens is what is looked up and where it goes, whatever the names are."""

from __future__ import annotations

import textwrap

import pytest
from generation_cases import anatomy_of, applied, edited, load

from patchgen import source
from patchgen.anatomy import study
from patchgen.anatomy.embeddings import Embeddings
from patchgen.errors import PassMismatch
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
        (f"{GIVEN}\nnoise = torch.zeros_like(x)", ["x"]),
        (f"{GIVEN}\nscale = x.detach() * 0", ["x"]),
        (f"{GIVEN}\nstate, row, grow = {{'x': x}}, [x], lambda y: x + y", ["x"]),
        (f"{GIVEN}\nmeans = [one.mean() for one in x]", ["x"]),
        (f"{GIVEN}\nfor one in x:\n    pass", ["x"]),
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


MERGE = """        inputs_embeds = inputs_embeds.masked_scatter(pixel_values > 0, features)
        return self.language_model(inputs_embeds)
"""
TAKES_IMAGES = """
class ExampleModel(ExamplePreTrainedModel):
    def get_image_features(self, pixel_values):
        return self.vision_tower(pixel_values)

    def forward(self, input_ids, pixel_values=None):
        inputs_embeds = self.get_input_embeddings()(input_ids)
        text = inputs_embeds.clone()
        if pixel_values is not None:
            features = self.get_image_features(pixel_values)
"""


@pytest.mark.parametrize(
    ("below", "name"),
    [
        (MERGE, "inputs_embeds"),  # nothing reads the copy
        (MERGE.replace("return self.language_model(", "return text, self.language_model("), "inputs_embeds"),
        (MERGE.replace("        return", "        text = text * 2\n        return text,"), "inputs_embeds"),
        (MERGE.replace("inputs_embeds", "text"), "text"),
        (MERGE.replace("inputs_embeds =", "x =").replace("(inputs_embeds)", "(x)"), "inputs_embeds"),  # alone read
    ],
)
def test_a_tower_enters_the_embeddings_that_its_features_go_into(below: str, name: str):
    text = applied(DummyForward(), TAKES_IMAGES + below).module.text
    assert f"{name} = ops.absent_tower({name}, pixel_values, self.get_image_features)" in text


@pytest.mark.parametrize(
    "below", ["        return self.language_model(input_ids, features)\n", MERGE.replace("pixel_values > 0", "text")]
)
def test_embeddings_that_none_or_several_names_may_hold_are_refused(below: str):
    if "text" in below:
        below = below.replace("        return", "        text = text + features\n        return")
    with pytest.raises(PassMismatch, match="one name of embeddings that the features from get_image_features go into"):
        applied(DummyForward(), TAKES_IMAGES + below)


@pytest.mark.parametrize(
    ("line", "name"),
    [("noise = torch.zeros_like(inputs_embeds)", "noise"), ("text_only = inputs_embeds.clone()", "text_only")],
)
def test_a_line_above_a_tower_does_not_divert_it(line: str, name: str):
    """Llava with another name for what is made of its embeddings, which nothing reads."""
    origin = load("llava")
    anchor = "        mm_encoder_outputs = mm_encoder_outputs if mm_encoder_outputs is not None else {}\n"
    origin = edited(origin, (anchor, f"        {line}\n{anchor}"))
    module = source.parse(origin.text, origin.path)
    text = DummyForward().apply(module, study(module, origin)).module.text
    assert "inputs_embeds = ops.absent_tower(inputs_embeds, pixel_values, self.get_image_features)" in text
    assert f"ops.absent_tower({name}" not in text
