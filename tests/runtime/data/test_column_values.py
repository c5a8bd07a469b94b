"""Values of a row's columns: which count as none, which are read, and which are refused with file and line."""

from __future__ import annotations

import pytest

from patchgen.runtime.data import SourceConfig
from patchgen.runtime.data.formats import WrongColumns
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.rows import Rows

ASK, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
ALPACA = {"instruction": "Hi", "output": "Hello"}
PAIR = {"chosen": "Hello", "rejected": "Go"}


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("chat", {**ALPACA, "input": [None]}),
        ("chat", {**ALPACA, "system": [None]}),
        ("preference", {**PAIR, "instruction": [None]}),
    ],
)
def test_a_list_of_none_is_a_value_of_another_type(kind, row):
    """Such a list counted as no value, and then ended the run with a TypeError."""
    with pytest.raises(BadSample, match=r"x: column '.*' holds list of nothing, expected text"):
        Rows(SourceConfig("x"), kind)("x", row)


@pytest.mark.parametrize("other", [{"conversations": []}, {"instruction": None}, {"input": [ASK]}])
def test_a_pair_is_refused_for_no_column_that_nothing_reads(other):
    """An empty list counted as a second prompt, and an input was checked without an instruction before it."""
    assert Rows(SourceConfig("x"), "preference")("x", {"prompt": "Hi", **PAIR, **other})["chosen"] == [ASK, ANSWER]
    with pytest.raises(BadSample, match="x: column 'input' holds int, expected text"):
        Rows(SourceConfig("x"), "preference")("x", {**PAIR, "instruction": "Hi", "input": 3})


def test_the_advice_for_two_prompts_holds_for_rows_of_a_transform():
    """`columns` is refused beside a transform, so it was the only advice and could not be taken."""
    with pytest.raises(
        WrongColumns, match=r"expected one of them\. To fix: .*; a data.sources\[\].transform returns only"
    ):
        Rows(SourceConfig("x"), "preference")("x", {"prompt": "Hi", "instruction": "Hi", **PAIR})


@pytest.mark.parametrize(("one", "many"), [("image", "images"), ("video", "videos"), ("audio", "audios")])
def test_an_empty_text_is_no_item_beside_the_other_column_of_a_kind(one, many):
    """It counted as an item, so the row was refused for two columns with media."""
    for media, used in (({one: "", many: ["a"]}, "a"), ({one: "a", many: [""]}, "a"), ({one: "", many: []}, "")):
        row = {"messages": [ASK, ANSWER], **media}
        assert Rows(SourceConfig("x"), "multimodal")("x", row)[many] == [used]
