"""Defaults of position ids under sequence parallelism: which are replaced on a slice, and which keep a guard."""

from __future__ import annotations

import textwrap

import pytest
from generation_cases import applied

from patchgen.passes.language_sp import LanguageSP

POSITIONS = LanguageSP.EXAMPLES[0].before
COUNTED = "torch.arange(inputs_embeds.shape[1]).unsqueeze(0)"


@pytest.mark.parametrize(
    ("default", "is_counted"),
    [
        (COUNTED, True),
        (
            "torch.arange(0, inputs_embeds.shape[1], device=self.device)[None].view(1, 1, -1)".replace("[None]", ""),
            True,
        ),
        (f"({COUNTED} + (past.get_seq_length() if past is not None else 0)).expand(3, -1)", True),
        (COUNTED.replace("shape[1]", "shape[1]) + (2"), False),
        (COUNTED.replace("arange(", "arange(1, "), False),
        ("attention_mask.cumsum(-1) - 1", False),
    ],
)
def test_positions_that_upstream_counts_otherwise_are_not_replaced_on_a_slice(default: str, is_counted: bool):
    text = POSITIONS.replace(COUNTED, default).replace("inputs_embeds=None)", "inputs_embeds=None, past=None)")
    written = applied(LanguageSP(), text).module.text
    assert "position_ids = ops.sequence_position_ids(position_ids, inputs_embeds)" in written
    assert ('ops.require_whole_sequence("position_ids")' not in written) == is_counted


BRANCH = f"        if position_ids is None:\n            position_ids = {COUNTED}\n"


@pytest.mark.parametrize(
    "stores",
    [
        "if position_ids is None:\n    position_ids = torch.arange(0, 2 * S, step=2)",
        "if position_ids is None:\n    position_ids = torch.arange(1, end=S + 1)",
        "if position_ids is None:\n    position_ids = torch.arange(S).repeat(2)",
        "if position_ids is None:\n    position_ids = torch.arange(S)\n    position_ids *= 2",
        "if position_ids is None:\n    position_ids = torch.arange(S)\n    position_ids += 2",
        "if position_ids is None:\n    position_ids = torch.arange(S)\n    position_ids.mul_(2)",
        "if position_ids is None:\n    position_ids = torch.arange(S)\nposition_ids[:, 1:] = 0",
        "if position_ids is None:\n    position_ids = torch.arange(S)\nelse:\n    position_ids = position_ids * 2",
        "if position_ids is None:\n    if attention_mask is None:\n        position_ids = torch.arange(S)\n"
        "    else:\n        position_ids = attention_mask.cumsum(-1)",
        "position_ids = 2 * torch.arange(S) if position_ids is None else position_ids",
        "position_ids = position_ids or 2 * torch.arange(S)",
        "if position_ids is not None:\n    pass\nelse:\n    position_ids = 2 * torch.arange(S)",
        "if None is position_ids:\n    position_ids = 2 * torch.arange(S)",
        "if position_ids == None:\n    position_ids = 2 * torch.arange(S)",
        "if not isinstance(position_ids, torch.Tensor):\n    position_ids = 2 * torch.arange(S)",
        "places = position_ids\nif places is None:\n    places = 2 * torch.arange(S)",
        "places = position_ids\nother: Tensor = places\nif other is None:\n    other = 2 * torch.arange(S)",
        "places = 2 * torch.arange(S) if position_ids is None else position_ids",
        "places = position_ids or 2 * torch.arange(S)",
    ],
)
def test_positions_stored_in_a_form_that_is_not_known_are_not_replaced_on_a_slice(stores: str):
    written = applied(LanguageSP(), POSITIONS.replace(BRANCH, textwrap.indent(stores, " " * 8) + "\n")).module.text
    assert stores.splitlines()[-1].strip() in written
    assert 'if position_ids is None:\n            ops.require_whole_sequence("position_ids")' in written


def test_positions_may_have_another_name():
    stores = "        places = position_ids\n        if places is None:\n            places = torch.arange(S)\n"
    written = applied(LanguageSP(), POSITIONS.replace(BRANCH, stores)).module.text
    assert "ops.sequence_position_ids" in written and "require_whole_sequence" not in written


def test_rows_of_positions_are_known():
    """Those of transformers' multimodal rotary embeddings: text positions above those of the media."""
    rows = """position_ids = torch.arange(S).view(1, 1, -1).expand(4, B, -1)
        elif position_ids.ndim == 2:
            position_ids = position_ids[None, ...].expand(4, position_ids.shape[0], -1)
        if position_ids.ndim == 3 and position_ids.shape[0] == 4:
            text_position_ids = position_ids[0]
            position_ids = position_ids[1:]
        if cache.seen is not None:
            position_ids = torch.cat([cache.seen, position_ids], dim=-1)"""
    assert (
        "require_whole_sequence"
        not in applied(LanguageSP(), POSITIONS.replace(f"position_ids = {COUNTED}", rows)).module.text
    )


COUNTING = """
class Places(nn.Embedding):
    def forward(self, x, offset=0):
        return super().forward({looked_up})

class ExampleModel(PreTrainedModel):
    def __init__(self, config):
        self.words = nn.Embedding(config.vocab_size, 8)
        self.where = {table}
        self.layers = nn.ModuleList([ExampleLayer(config)])

    def forward(self, input_ids=None, inputs_embeds=None):
        x = self.words(input_ids) + self.where({given})
        for layer in self.layers:
            x = layer(x)
        return x
"""
OWN, TORCHS = "Places(config.size, 8)", "nn.Embedding(config.size, 8)"


@pytest.mark.parametrize(
    ("table", "looked_up", "given", "is_counted"),
    [
        (OWN, "torch.arange(x.shape[1]) + offset", "input_ids", True),
        (OWN, "(x != 1).cumsum(1)", "x=input_ids", True),
        (OWN, "x", "torch.arange(8)", True),
        (OWN, "x", "input_ids", False),
        (TORCHS, "x", "torch.arange(8).expand(2, -1)", True),
        ("nn.Embedding(config.max_position_embeddings, 8)", "x", "(input_ids == 3).long()", False),
    ],
)
def test_a_table_of_positions_is_one_in_which_what_is_counted_is_looked_up(
    table: str, looked_up: str, given: str, is_counted: bool
):
    hits = applied(LanguageSP(), COUNTING.format(table=table, looked_up=looked_up, given=given)).hits
    assert [hit.site for hit in hits] == ["ExampleModel.forward"] * is_counted


WRAPPED = """
class Wrapper(nn.Module):
    def __init__(self, config):
        self.table = nn.Embedding(config.size, 8)

    def forward(self, places, ids=None):
        return self.table({looked_up})
"""


@pytest.mark.parametrize(
    ("looked_up", "given", "is_counted"),
    [
        ("places", "torch.arange(8)", True),
        ("places", "ids=input_ids, places=torch.arange(8)", True),
        ("ids", "ids=input_ids, places=torch.arange(8)", False),
        ("places", "input_ids, torch.arange(8)", False),
    ],
)
def test_positions_handed_to_a_module_that_looks_them_up_are_known(looked_up: str, given: str, is_counted: bool):
    text = WRAPPED.format(looked_up=looked_up) + COUNTING.format(table="Wrapper(config)", looked_up="x", given=given)
    assert [hit.site for hit in applied(LanguageSP(), text).hits] == ["ExampleModel.forward"] * is_counted


KEPT = "        self.register_buffer('steps', torch.arange(8).expand((1, -1)), persistent=False)\n"


@pytest.mark.parametrize(
    ("kept", "is_counted"),
    [
        (KEPT, True),
        ("        self.steps = nn.Buffer(torch.arange(8))\n", True),
        ("        steps = torch.arange(8)\n        self.register_buffer('steps', tensor=steps[None])\n", True),
        (KEPT.replace("arange(8)", "zeros(8)"), False),
        (KEPT.replace("'steps'", "'others'"), False),
    ],
)
def test_positions_that_a_buffer_keeps_are_known(kept: str, is_counted: bool):
    text = COUNTING.format(table=TORCHS, looked_up="x", given="self.steps[:, : input_ids.shape[1]]")
    text = text.replace("        self.layers", f"{kept}        self.layers")
    assert [hit.site for hit in applied(LanguageSP(), text).hits] == ["ExampleModel.forward"] * is_counted


LOOKED_UP = LanguageSP.EXAMPLES[1].before


@pytest.mark.parametrize(
    ("changes", "is_served"),
    [
        ({}, True),
        (
            {
                "arange(input_ids.shape[1])": "arange(past, past + input_ids.shape[1])",
                "position_ids=None)": "past=0, position_ids=None)",
            },
            True,
        ),
        ({"torch.arange(input_ids.shape[1])": "(input_ids != 1).cumsum(1) - 1"}, False),
        ({"arange(input_ids.shape[1])": "arange(1, input_ids.shape[1] + 1)"}, False),
        ({"position_ids": "places"}, False),
    ],
)
def test_counted_positions_are_looked_up_by_slice_where_a_table_takes_positions(
    changes: dict[str, str], is_served: bool
):
    text = LOOKED_UP
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    written = applied(LanguageSP(), text).module.text
    assert ("ops.look_up_positions(" in written) == is_served
    assert ("ops.require_whole_sequence(" in written) == (not is_served)


def test_the_lookup_of_a_decoder_without_keyword_arguments_finds_the_documents_itself():
    text = LOOKED_UP.replace(", **kwargs", "")
    assert "tokens=inputs_embeds)" in applied(LanguageSP(), text).module.text


def test_the_shape_of_a_lookup_above_the_embeddings_is_that_of_the_inputs():
    text = LOOKED_UP.replace(
        "        if inputs_embeds is None:\n",
        "        places = self.embed_positions(input_ids)\n        if inputs_embeds is None:\n",
    ).replace("+ self.embed_positions(input_ids)", "+ places")
    written = applied(LanguageSP(), text).module.text
    assert "tokens=inputs_embeds if input_ids is None else input_ids" in written
