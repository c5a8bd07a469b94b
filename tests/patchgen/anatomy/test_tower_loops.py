"""The loop over a tower's layers: what it reads and leaves, and where rows must be whole again."""

from __future__ import annotations

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.towers import LayerLoop, is_divided, layer_loop
from patchgen.errors import LeftAlone

TOWER = """
import torch
from torch import nn
from transformers import PreTrainedModel

def squeeze(x):
    return x.flip(0)

class Attention(nn.Module):
    def forward(self, x, cu_seqlens=None):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        if is_flash_attention_requested(self.config):
            q = x.reshape(x.shape[0], 2, -1).transpose(0, 1).unsqueeze(0)
            return attend(self, q, q, q, cu_seq_lens_q=cu_seqlens)[0]
        return x

class Block(nn.Module):
    def __init__(self, config):
        self.attn = Attention(config)

    def forward(self, x, cu_seqlens=None, max_seqlen=None, cos=None, sin=None, **kwargs):
        return x + self.attn(x, cu_seqlens)

class Merger(nn.Module):
    def __init__(self, config):
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
        self.last = nn.ModuleList([nn.Linear(8, 8), nn.GELU()])

    def forward(self, x):
        x = self.mlp(self.norm(x).view(-1, 32))
        for part in self.last:
            x = part(x)
        return x

class Tower(PreTrainedModel):
    def __init__(self, config):
        self.patch_embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(config) for _ in range(3)])
        self.norm = nn.LayerNorm(8)
        self.act = ACT2FN["gelu"]
        self.merger = Merger(config)

    def forward(self, hidden_states, grid_thw, **kwargs):
        hidden_states = self.patch_embed(hidden_states)
        cu_seqlens = lengths_of(grid_thw)
        max_seqlen = cu_seqlens.max()
        order = order_of(grid_thw)
        cos, sin = self.rotary(grid_thw)
        taken = []
        for number, blk in enumerate(self.blocks):
            hidden_states = blk(hidden_states, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, cos=cos, sin=sin, **kwargs)
        hidden_states = self.norm(hidden_states)
        hidden_states = self.act(hidden_states)
        merged = self.merger(hidden_states)
        return merged
"""
LOOP = LayerLoop(
    place=6,
    layers="blocks",
    rows=("hidden_states", "cos", "sin"),
    bounds=("cu_seqlens",),
    longest=("max_seqlen",),
    group="1",
    gathers=((9, ("hidden_states",)),),
    attentions=("Attention",),
)
CALL = "hidden_states = blk("
BUILT = "        self.patch_embed ="
NORM = "        hidden_states = self.norm(hidden_states)\n"
RETURN = "        return merged\n"
OUTPUT = RETURN.replace("merged", "Output(last_hidden_state=hidden_states, pooler_output=merged)")


def read(*edits: tuple[str, str]) -> LayerLoop:
    text = TOWER
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    anatomy = anatomy_of(text)
    return layer_loop(anatomy, anatomy.classes["Tower"])


def test_a_loop_by_what_its_layers_take():
    assert read() == LOOP


@pytest.mark.parametrize(
    ("edits", "changed"),
    [
        ([("for number, blk in enumerate(self.blocks)", "for blk in self.blocks[:2]")], {}),
        ([("blk(hidden_states, ", "blk(x=hidden_states, ")], {}),
        # The side that the config states, by whatever attribute; no attribute of that name that holds something else.
        ([(BUILT, "        self.side = config.spatial_merge_size\n" + BUILT)], {"group": "self.side**2", "gathers": ((10, ("merged",)),)}),
        ([(BUILT, "        self.side = config.merge_size\n        self.unit = self.side * self.side\n" + BUILT)], {"group": "self.unit", "gathers": ((10, ("merged",)),)}),
        ([(BUILT, "        self.unit = config.merge_size**2\n" + BUILT)], {"group": "self.unit", "gathers": ((10, ("merged",)),)}),
        ([(BUILT, "        self.spatial_merge_size = config.patch_size\n" + BUILT)], {}),
        ([(BUILT, "        self.spatial_merge_unit = config.merge_size * config.patch_size\n" + BUILT)], {}),
        # What follows hands the rows to modules, or computes with them.
        ([(NORM, NORM.replace("self.norm(hidden_states)", "self.norm(hidden_states.flip(0))"))], {"gathers": ((7, ("hidden_states",)),)}),
        ([(NORM, NORM.replace("self.norm(hidden_states)", "hidden_states - hidden_states.mean(0)"))], {"gathers": ((7, ("hidden_states",)),)}),
        ([(NORM, NORM.replace("self.norm(hidden_states)", "hidden_states + 1"))], {"gathers": ((7, ("hidden_states",)),)}),
        ([(NORM, "        hidden_states = hidden_states[order]\n")], {"gathers": ((7, ("hidden_states",)),)}),
        ([(NORM, "        order = order + 1\n" + NORM)], {"gathers": ((10, ("hidden_states",)),)}),
        # Two results of the same rows.
        ([(RETURN, OUTPUT)], {}),
        ([("merged = self.merger(hidden_states)", "merged = self.norm(hidden_states)")], {"gathers": ((10, ("merged",)),)}),
        ([("merged = self.merger(hidden_states)", "merged = self.norm(hidden_states)"), (RETURN, RETURN.replace("merged", "merged, hidden_states"))], {"gathers": ((10, ("hidden_states", "merged")),)}),
        ([("merged = self.merger(hidden_states)", "merged = self.norm(hidden_states)"), (RETURN, OUTPUT)], {"gathers": ((10, ("merged",)),)}),
        ([("cos=cos, sin=sin, **kwargs)", "cos=cos, sin=sin)\n            taken.append(hidden_states)"), (RETURN, RETURN.replace("merged", "merged, taken"))], {"gathers": ((9, ("hidden_states",)), (10, ("taken",)))}),
        # A value of the layer before, and one that the layers only write.
        ([(CALL, "order = number\n            " + CALL)], {}),
    ],
)  # fmt: skip
def test_another_form_gives_another_loop(edits: list, changed: dict):
    assert read(*edits) == LayerLoop(**{**vars(LOOP), **changed})


@pytest.mark.parametrize(
    "edit",
    [
        ("for number, blk in enumerate(self.blocks)", "for number in range(3)"),
        (
            "        for number, blk",
            "        for blk in self.blocks:\n            hidden_states = blk(hidden_states)\n        for number, blk",
        ),
        (CALL, "other = blk("),
        ("cu_seqlens=cu_seqlens, ", ""),
        ("max_seqlen=max_seqlen, ", "max_seqlen=max_seqlen, order=order, "),
        (CALL, "if number:\n                order = order + 1\n            " + CALL),
        ("is_flash_attention_requested", "other"),
        ("ALL_ATTENTION_FUNCTIONS.get_interface", "chosen"),
        ("self.attn = Attention", "self.attn = Other"),
    ],
)
def test_what_is_not_understood_is_unread(edit: tuple[str, str]):
    with pytest.raises(LeftAlone):
        read(edit)


@pytest.mark.parametrize(
    ("edits", "gathered"),
    [
        ([], (10, ("merged",))),
        ([(NORM, NORM + "        hidden_states = hidden_states - hidden_states.mean(0)\n")], (8, ("hidden_states",))),
        ([(NORM, NORM + "        hidden_states = hidden_states[1:]\n")], (8, ("hidden_states",))),
        ([(RETURN, "        merged = merged.unsqueeze(0)\n        merged = merged.squeeze(0)\n" + RETURN)], (10, ("merged",))),
        ([("self.act(hidden_states)\n", "self.act(hidden_states[None])[0]\n")], (8, ("hidden_states",))),
        ([(NORM, "        hidden_states = hidden_states[None]\n" + NORM)], (7, ("hidden_states",))),
        ([(NORM, "        count = hidden_states.shape[0]\n" + NORM)], (7, ("hidden_states",))),
        ([("merged = self.merger(hidden_states)", "merged = hidden_states.view(-1, 4 * hidden_states.shape[-1])")], (9, ("hidden_states",))),
        ([("merged = self.merger(hidden_states)", "merged = hidden_states.view(-1, hidden_states.shape[-1])")], (10, ("merged",))),
    ],
)  # fmt: skip
def test_groups_of_rows_are_merged_apart_or_gathered_first(edits: list, gathered: tuple):
    merges = ("        self.blocks =", "        self.unit = config.merge_size**2\n        self.blocks =")
    assert read(merges, *edits).gathers == (gathered,)


@pytest.mark.parametrize(
    "edits",
    [
        [("            hidden_states = blk(", "            hidden_states = hidden_states * cu_seqlens\n            hidden_states = blk(")],
        [("cu_seqlens=cu_seqlens", "cu_seqlens=max_seqlen"), ("max_seqlen=max_seqlen", "max_seqlen=cu_seqlens * 2")],
        [("cos=cos", "scale=cos")],
        [("cu_seqlens=cu_seqlens", "cu_len_scale=cu_seqlens")],
    ],
)  # fmt: skip
def test_lengths_are_what_the_layers_take_as_such(edits: list):
    with pytest.raises(LeftAlone):
        read(*edits)


def test_the_names_of_lengths_are_free():
    renamed = read(
        ("cu_seqlens = lengths_of", "bounds = lengths_of"),
        ("= cu_seqlens.max()", "= bounds.max()"),
        ("=cu_seqlens, max", "=bounds, max"),
    )
    assert renamed.bounds == ("bounds",) and renamed.longest == ("max_seqlen",)
    through = read(
        (CALL, "now = cu_seqlens if number else order\n            " + CALL),
        ("cu_seqlens=cu_seqlens", "cu_seqlens=now"),
    )
    assert set(through.bounds) == {"cu_seqlens", "order"}


def test_rows_that_are_never_returned_are_unread():
    merges = (BUILT, "        self.unit = config.merge_size**2\n" + BUILT)
    with pytest.raises(LeftAlone, match="never returned"):
        read(merges, (RETURN, RETURN.replace("merged", "grid_thw")))


def test_a_value_that_a_layer_writes_before_it_reads_it_is_its_own():
    """An `if` does not count as written."""
    assert read((CALL, "order = number\n            later = order + 1\n            " + CALL)).rows == LOOP.rows
    with pytest.raises(LeftAlone, match="read order"):
        read((CALL, "hidden_states = hidden_states + order\n            order = number\n            " + CALL))
    with pytest.raises(LeftAlone, match="read order"):
        read(
            (
                CALL,
                "if number:\n                order = number\n            hidden_states = hidden_states + order\n            "
                + CALL,
            )
        )


def test_an_attention_that_takes_inputs_apart_is_left_alone():
    with pytest.raises(LeftAlone, match="does not attend to all inputs in one row"):
        read((".transpose(0, 1).unsqueeze(0)", ".transpose(1, 2)"))
    assert read((".reshape(x.shape[0], 2, -1).transpose(0, 1).unsqueeze(0)", ".reshape(1, 2, x.shape[0], -1)")) == LOOP


def test_a_tower_by_role_is_divided_where_its_loop_is_read():
    for text, divided in (
        (TOWER, True),
        (TOWER.replace("cu_seqlens=cu_seqlens, ", ""), False),
        (TOWER.replace("patch_embed", "proj"), True),
        (TOWER.replace("self.patch_embed = nn.Linear(8, 8)", "self.patch_embed = nn.LayerNorm(8)"), False),
    ):
        anatomy = anatomy_of(text)
        assert is_divided(anatomy, anatomy.classes["Tower"]) is divided
    assert not is_divided(anatomy, anatomy.classes["Block"])


def test_a_list_beside_the_layers_may_treat_each_row_by_itself():
    both = ("for number, blk in enumerate(self.blocks)", "for blk, extra in zip(self.blocks, self.extra)")
    held = ("        self.norm =", "        self.extra = nn.ModuleList([nn.LayerNorm(8)])\n        self.norm =")
    assert read(both, (CALL, f"hidden_states = extra(hidden_states)\n            {CALL}"), held) == LOOP
