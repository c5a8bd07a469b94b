"""A head projects to the vocabulary and computes a loss, however its code says so."""

from __future__ import annotations

import textwrap

import pytest
from generation_cases import anatomy_of
from role_cases import HEADER, MODEL, forward, roles

from patchgen.anatomy.roles import Role, unread_heads
from patchgen.source import parse


def test_a_head_takes_labels_and_generates_or_computes_a_loss():
    loss = forward("return self.loss_function(self.lm_head(x), labels)", parameters="x, labels")
    head = "def __init__(self, config):\n    self.lm_head = nn.Linear(8, config.vocab_size)\n"
    assert roles(loss, "PreTrainedModel, GenerationMixin")[Role.HEAD] == "generates and takes labels"
    assert roles(head + loss, MODEL)[Role.HEAD] == "projects to the vocabulary and computes a loss"
    for code in (loss, head + loss.replace("loss_function", "other"), head + loss.replace("labels", "targets")):
        assert Role.HEAD not in roles(code, MODEL)
    renamed = head.replace("self.lm_head", "rows = config.vocab_size\n    self.lm_head").replace(
        "8, config.vocab_size", "8, rows"
    )
    assert Role.HEAD in roles(renamed + loss, MODEL)
    assert Role.HEAD not in roles(head + loss.replace("self.lm_head(x)", "x"), MODEL)
    size = ("8, config.vocab_size", "config.vocab_width, config.num_labels")
    for old, new in (("vocab_size", "size"), ("nn.Linear", "nn.Embedding"), size):
        assert Role.HEAD not in roles(head.replace(old, new) + loss, MODEL)


USES = (
    "head = self.lm_head\nreturn self.loss_function(head(x), labels)",
    "return self.loss_function(F.linear(x, self.lm_head.weight), labels)",
    "return self.loss_function(self.project(x), labels)",
    "return self.loss_function(getattr(self, 'lm_head')(x), labels)",
    "return self.loss_function(self.get_output_embeddings()(x), labels)",
    "loss = self.loss_function\nreturn loss(self.lm_head(x), labels)",
)
PROJECT = "def project(self, x):\n    return self.once_more(x)\n"
ONCE_MORE = "def once_more(self, x):\n    return self.lm_head(x) if x else self.project(x)\n"


def head_of(layer: str, code: str, above: str = "") -> bool:
    init = f"def __init__(self, config):\n{textwrap.indent(above, '    ')}    self.lm_head = {layer}\n"
    members = init + PROJECT + ONCE_MORE + forward(*code.split("\n"), parameters="x, labels")
    return Role.HEAD in roles(members, MODEL)


@pytest.mark.parametrize("code", USES)
def test_any_use_of_the_projection_makes_a_head(code: str):
    """The alias, the weight alone, a method of the class: what `fused_loss` cannot read it refuses, by the role."""
    assert head_of("nn.Linear(8, config.vocab_size)", code)
    assert not head_of("nn.Linear(8, config.size)", code)
    assert not head_of("nn.Linear(8, config.vocab_size)", "self.lm_head = x\nreturn self.loss_function(x, labels)")


CALLS = "return self.loss_function(self.lm_head(x), labels)"
TO_VOCABULARY = (
    ("nn.Linear(8, config.vocab_size + 0)", ""),
    ("nn.Linear(8, max(8, self.rows))", "self.rows = config.vocab_size\n"),
    ("nn.Linear(8, getattr(config, 'vocab_size'))", ""),
    ("nn.Linear(8, of_text.vocab_size)", "of_text = config.get_text_config()\n"),
    ("nn.Linear(8, self.vocab_size)", ""),  # of which the file says no more
    ("nn.Linear(*sizes)", "sizes = (8, config.vocab_size)\n"),
    ("nn.Sequential(nn.Dropout(0.1), nn.Linear(8, config.vocab_size))", ""),
)
TO_OTHERS = (
    ("nn.Linear(8, config.num_labels + 0)", ""),
    ("nn.Linear(8, self.rows)", "self.rows = config.num_labels\n"),
    ("nn.Linear(8, getattr(config, 'num_labels'))", ""),
    ("nn.Linear(8, rows)", "rows = 8\nrows = rows + 1\n"),
    ("nn.Sequential(nn.Linear(8, config.vocab_size), nn.Linear(config.vocab_size, 8))", ""),
    ("nn.Linear(8, self.vocab_size)", "self.vocab_size = 8\n"),
    ("nn.Sequential()", ""),
    ("nn.Sequential(nn.Dropout(0.1), last)", "last = nn.Linear(8, config.vocab_size)\n"),  # left as upstream wrote it
    ("head", "head = make()\nlast = nn.Sequential(head)\nhead = nn.Sequential(last)\n"),
)


@pytest.mark.parametrize(("layer", "above"), [*TO_VOCABULARY, *TO_OTHERS])
def test_a_projection_to_the_vocabulary_has_rows_computed_from_its_size(layer: str, above: str):
    assert head_of(layer, CALLS, above) is ((layer, above) in TO_VOCABULARY)
    assert not head_of(layer, "return self.loss_function(x, labels)", above)


def test_a_projection_that_other_code_sets_as_well_makes_a_head():
    head = "def __init__(self, config):\n    self.lm_head = nn.Linear(8, config.vocab_size)\n"
    code = head + forward(CALLS, parameters="x, labels")
    assert Role.HEAD in roles(code, MODEL, "def change(model):\n    model.lm_head = nn.Identity()\n")


def test_a_listed_head_without_the_role_is_named():
    text = f"{HEADER}\nclass Head({MODEL}):\n    pass\n"
    told = unread_heads(parse(text), anatomy_of(text, heads=("Head", "NotHere")))
    assert len(told) == 1 and told[0].startswith("upstream lists Head as a head")
    good = f"{HEADER}\nclass Head({MODEL}, GenerationMixin):\n    def forward(self, labels):\n        pass\n"
    assert unread_heads(parse(good), anatomy_of(good, heads=("Head",))) == []
