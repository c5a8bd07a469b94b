"""The chunks of sound that a tower convolves: from which statement, up to their selection, and which names hold them."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.towers import ChunkedConvolution, chunked_convolution

CONVOLUTION = """
class Sound(PreTrainedModel):
    def __init__(self, config):
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(1, 8, 3)
        self.act = nn.GELU()

    def forward(self, features, lengths):
        padded_feature, padded_mask = pad(features, lengths)
        parts = []
        embed = self.act(self.conv1(padded_feature))
        embed = embed * padded_mask
        embed = self.conv2(embed)
        parts.append(embed)
        mask = lengths > 0
        selected = torch.index_select(embed, 0, mask)
        return selected
"""


def chunks(*edits: tuple[str, str]) -> ChunkedConvolution | None:
    text = CONVOLUTION
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    anatomy = anatomy_of(text)
    info = anatomy.classes["Sound"]
    assert isinstance(info.methods["forward"], ast.FunctionDef)
    return chunked_convolution(anatomy, info, info.methods["forward"])


def test_padded_chunks_are_convolved_up_to_their_selection():
    assert chunks() == ChunkedConvolution(2, 7, ("padded_mask", "padded_feature"), "embed")
    first = "self.act(self.conv1(padded_feature))\n        embed = embed * padded_mask"
    product, turned = (
        "self.act(self.conv1(padded_feature)) * padded_mask",
        "padded_mask * self.act(self.conv1(padded_feature))",
    )
    for at_once in (product, turned):  # however it is written
        assert chunks((first, at_once)) == ChunkedConvolution(2, 6, ("padded_mask", "padded_feature"), "embed")
    names = [("padded_feature", "padded_sound"), ("padded_mask", "padded_tail")]
    for at_once in (product, turned):
        found = chunks((first, at_once), *names)
        assert found == ChunkedConvolution(2, 6, ("padded_tail", "padded_sound"), "embed")
    assert chunks(("padded_mask", "tail")) == ChunkedConvolution(2, 7, ("tail", "padded_feature"), "embed")
    assert chunks(("* padded_mask", "* 2")) == ChunkedConvolution(2, 7, ("padded_feature",), "embed")


@pytest.mark.parametrize(
    "edit",
    [
        ("nn.Conv2d(1, 8, 3)\n        self.conv2 = nn.Conv2d(1, 8, 3)", "nn.Linear(1, 8)\n        self.conv2 = nn.Linear(1, 8)"),
        ("torch.index_select(embed, 0, mask)", "embed[mask]"),
        ("selected = torch.index_select(embed, 0, mask)", "selected = torch.index_select(embed, 0, mask)\n        again = torch.index_select(embed, 0, mask)"),
        ("selected = torch.index_select(embed, 0, mask)\n        return selected", "return torch.index_select(embed, 0, mask)"),
        ("index_select(embed", "index_select(features"),
        ("padded_mask = pad(features, lengths)", "padded_mask = features.shape"),
        ("parts = []", "parts = [features]"),
        ("* padded_mask", "* other\n        padded_mask = 2"),
        ("        padded_feature, padded_mask = pad(features, lengths)\n", "        padded_feature = torch.index_select(features, 0, lengths)\n"),
    ],
)  # fmt: skip
def test_other_convolutions_are_left_alone(edit: tuple[str, str]):
    if edit[0] == "* padded_mask":
        assert chunks(edit) is not None  # it is no part of what is read above
    else:
        assert chunks(edit) is None
