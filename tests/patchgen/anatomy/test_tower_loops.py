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
        # What follows treats each row by itself, or does not.
        ([(NORM, NORM.replace("self.norm(hidden_states)", "self.norm(hidden_states.flip(0))"))], {"gathers": ((7, ("hidden_states",)),)}),
        ([(NORM, NORM.replace("self.norm(hidden_states)", "hidden_states - hidden_states.mean(0)"))], {"gathers": ((7, ("hidden_states",)),)}),
        ([(NORM, NORM.replace("self.norm(hidden_states)", "hidden_states + 1"))], {}),
        ([("nn.LayerNorm(8)", "nn.Conv1d(8, 8, 1)")], {"gathers": ((7, ("hidden_states",)),)}),
        ([('ACT2FN["gelu"]', 'TABLE["gelu"]')], {"gathers": ((8, ("hidden_states",)),)}),
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
        ([("self.norm(x).view(-1, 32)", "self.norm(x).roll(1, 0).view(-1, 32)")], (9, ("hidden_states",))),
        ([("self.norm(x).view(-1, 32)", "self.norm(x).view(32, -1).mT")], (9, ("hidden_states",))),
        ([("nn.ModuleList([nn.Linear(8, 8)", "nn.ModuleList([nn.BatchNorm1d(8)")], (9, ("hidden_states",))),
        ([(RETURN, "        merged = merged.unsqueeze(0)\n        merged = merged.squeeze(0)\n" + RETURN)], (10, ("merged",))),
        ([("self.act(hidden_states)\n", "self.act(hidden_states[None])[0]\n")], (8, ("hidden_states",))),
        ([(NORM, "        hidden_states = hidden_states[None]\n" + NORM)], (7, ("hidden_states",))),
        ([(NORM, "        count = hidden_states.shape[0]\n" + NORM)], (7, ("hidden_states",))),
        ([("nn.Linear(32, 32)", "Linear(32, 32)"), ("from torch import nn", "from torch import nn\nfrom .parts import Linear")], (9, ("hidden_states",))),
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


TEST = "        if is_flash_attention_requested"
APART = "hidden_states = self.norm(hidden_states)\n            "


def attending(code: str) -> tuple[str, str]:
    """An attention that does more before it attends."""
    return TEST, f"        n = x.shape[0]\n        {code}\n{TEST}"


@pytest.mark.parametrize("code", ["x = x.mul(2)", "x = x.reshape(n, -1)", "m = n / 2", "m, two = x.shape\n        x = x.reshape(m, 2, -1) * two", "x = nn.functional.layer_norm(x, (8,))", "x = x.where(x > 0, 0)", "y = x.transpose(0, 1)"])  # fmt: skip
def test_attentions_may_do_what_keeps_rows_apart(code: str):
    assert read(attending(code)) == LOOP


@pytest.mark.parametrize(
    "code",
    [
        # Arithmetic with the number of rows.
        "x = x.div(n)",
        "x = torch.mul(x, n)",
        "x = x.clamp(max=n)",
        "m = n\n        x = x.pow(m)",
        "y, m = x, n\n        x = y.mul(m)",
        "x = x / cu_seqlens.numel()",
        "x = x.where(x > n, 0)",
        "x = attend(self, x, x, x, scaling=1 / n)[0]",
        # What goes through the rows, or makes one of several.
        "x = x - sum(x)",
        "x = list(reversed(x))",
        "x = nn.functional.layer_norm(x, x.shape)",
        "x = nn.functional.layer_norm(x, (4, 8))",
        "x = torch.where(x)",
        # Rows that are read in another form.
        "y = x.transpose(0, 1)\n        x = y.reshape(n, -1)",
        "y = x.transpose(0, 1)\n        z = y + 1\n        x = z.view(n, -1)",
        "x = x.reshape((-1, n))",
        "x = torch.reshape(x, (-1, n))",
        "x = x.reshape(2, n, -1)",  # heads before the rows of the source
        "y = x.view(n, 2, -1).transpose(0, 1)\n        x = y.reshape(n, -1)",
        "sizes = (x.shape[0], 2)\n        m, two = sizes\n        x = x * m",
        "sizes = x.shape\n        m, _ = sizes\n        x = x / m",
        "if n > 4:\n            x = x * 2",
        "x = x.softmax(0)",
        "y = x.transpose(0, 1)\n        x = y.softmax(-1)",
        "x = x + x.transpose(0, 1)",
    ],
)
def test_attentions_that_may_mix_rows_are_left_alone(code: str):
    with pytest.raises(LeftAlone, match="does more than to attend"):
        read(attending(code))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".transpose(0, 1).unsqueeze(0)", ".unsqueeze(0)"),  # heads where the interface takes rows
        (".reshape(x.shape[0], 2, -1).transpose(0, 1)", ".reshape(2, x.shape[0], -1)"),
        ("cu_seq_lens_q=cu_seqlens)", "cu_seq_lens_q=cu_seqlens, attention_mask=x)"),
    ],
)
def test_the_interface_is_handed_heads_and_rows_where_it_takes_them(old: str, new: str):
    with pytest.raises(LeftAlone, match="does more than to attend"):
        read((old, new))


def test_a_property_of_the_tower_is_what_it_returns():
    """The loop may call a list of modules under another name."""
    named = (
        "    @property\n    def others(self):\n        return self.extra\n\n    def forward(self, hidden_states, grid"
    )
    edits = [("    def forward(self, hidden_states, grid", named), (CALL, APART.replace("norm(", "others[0](") + CALL)]
    for module, is_read in (("nn.LayerNorm(8)", True), ("nn.BatchNorm1d(8)", False)):
        held = ("        self.norm =", f"        self.extra = nn.ModuleList([{module}])\n        self.norm =")
        if is_read:
            assert read(*edits, held) == LOOP
        else:
            with pytest.raises(LeftAlone, match="its loop does more"):
                read(*edits, held)


def test_modules_in_the_loop_are_known_to_keep_rows_apart():
    assert read((CALL, APART + CALL)) == LOOP
    for norm in ("nn.BatchNorm1d(8)", "elsewhere.Norm(8)"):
        with pytest.raises(LeftAlone, match="its loop does more"):
            read((CALL, APART + CALL), ("self.norm = nn.LayerNorm(8)", f"self.norm = {norm}"))
    with pytest.raises(LeftAlone, match="its loop does more"):  # by what it is called on as well
        read(
            (CALL, APART.replace("norm(", "extra[0](") + CALL),
            ("        self.norm =", "        self.extra = nn.ModuleList([nn.BatchNorm1d(8)])\n        self.norm ="),
        )
    with pytest.raises(LeftAlone, match="self.extra is not known"):
        read(
            ("for number, blk in enumerate(self.blocks)", "for blk, extra in zip(self.blocks, self.extra)"),
            (CALL, "hidden_states = extra(hidden_states)\n            " + CALL),
            ("        self.norm =", "        self.extra = nn.ModuleList([nn.BatchNorm1d(8)])\n        self.norm ="),
        )


def test_what_layers_may_call_is_known_by_what_its_name_resolves_to():
    """Not by its last name: another file's `squeeze` may mix rows, and so may its class of the attention's name."""
    added, imports = "return x + self.attn(x, cu_seqlens)", "from torch import nn\n"
    for call in ("torch.squeeze(x)", "x.squeeze()"):
        assert read((added, added.replace("return x", f"return {call}"))) == LOOP
    for call, taken in (("parts.squeeze(x)", "self.attn = "), ("self.more(x)", "self.more = parts.Attention(config)\n        self.attn = ")):  # fmt: skip
        with pytest.raises(LeftAlone, match="Block is not known to treat each row by itself"):
            read(
                (added, added.replace("return x", f"return {call}")),
                (imports, f"{imports}from elsewhere import parts\n"),
                ("self.attn = ", taken),
            )


AFTER = "max_seqlen=max_seqlen, cos=cos, sin=sin, **kwargs)\n"


@pytest.mark.parametrize(
    "code",
    [
        "hidden_states = hidden_states.roll(1, 0)",
        "hidden_states = hidden_states - hidden_states.mean(0)",
        "if hidden_states.shape[0] > 4:\n                hidden_states = hidden_states * 2",
        "self.kept = hidden_states",
        "taken.insert(0, hidden_states)",
        "hidden_states = squeeze(hidden_states)",
        "hidden_states = hidden_states * blk",
        "hidden_states = torch.stack([blk(part) for part in hidden_states])",
    ],
)
def test_a_loop_that_does_more_with_rows_is_left_alone(code: str):
    with pytest.raises(LeftAlone, match="its loop does more"):
        read((AFTER, f"{AFTER}            {code}\n"))


def test_a_loop_may_do_what_keeps_rows_apart():
    assert (
        read((AFTER, f"{AFTER}            hidden_states = hidden_states * 2 + hidden_states.mean(-1, keepdim=True)\n"))
        == LOOP
    )


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


def test_an_attention_may_be_handed_a_mask_that_has_no_rows():
    assert read(("attend(self, q, q, q, ", "attend(self, q, q, q, None, ")) == LOOP
