"""Rows of a source as fields: which values of columns count as none, which are read, and which are refused with their place."""

from __future__ import annotations

import numpy as np
import pytest

from patchgen.runtime.data import SourceConfig
from patchgen.runtime.data.formats import WrongColumns
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.rows import Rows

ASK, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
ALPACA = {"instruction": "Hi", "output": "Hello"}
PAIR = {"chosen": "Hello", "rejected": "Go"}


@pytest.mark.parametrize(
    ("kind", "row", "column"),
    [("chat", ALPACA, "input"), ("chat", ALPACA, "system"), ("preference", PAIR, "instruction")],
)
def test_a_list_of_none_is_a_value_of_another_type(kind, row, column):
    """Such a list counted as no value, and then ended the run with a TypeError."""
    with pytest.raises(BadSample, match=rf"^x: column '{column}' holds list of nothing, expected text"):
        Rows(SourceConfig("x"), kind)("x", {**row, column: [None]})


@pytest.mark.parametrize("label", [1, 0.5, np.int64(1), np.uint8(1), np.float32(0.5), np.float64(0.5)])
def test_a_label_is_a_number_of_python_or_numpy(label):
    """A transform may return numpy's: integers and fp32 were refused."""
    assert Rows(SourceConfig("x"), "classification")("x", {"text": "a", "label": label})["label"] == label


@pytest.mark.parametrize("label", [True, np.bool_(True), "1", None, np.array([1])])
def test_other_labels_are_refused(label):
    with pytest.raises(BadSample, match="label"):
        Rows(SourceConfig("x"), "classification")("x", {"text": "a", "label": label})


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
