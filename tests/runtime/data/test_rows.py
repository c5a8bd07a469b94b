"""Rows of a source as fields: which values of columns count as none, which are read, and which are refused with their place."""

from __future__ import annotations

import numpy as np
import pytest

from patchgen.runtime.data import SourceConfig
from patchgen.runtime.data.formats import WrongColumns
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.rows import RowMapper

ASK, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
ALPACA = {"instruction": "Hi", "output": "Hello"}
PAIR = {"chosen": "Hello", "rejected": "Go"}


def fields_of(kind, row):
    return RowMapper(SourceConfig("data.jsonl"), kind)("row 1", row)


@pytest.mark.parametrize(
    ("kind", "row", "column"),
    [("chat", ALPACA, "input"), ("chat", ALPACA, "system"), ("preference", PAIR, "instruction")],
)
def test_a_list_of_none_is_a_value_of_another_type(kind, row, column):
    """Before, such a list counted as no value, and then ended the run with a TypeError."""
    with pytest.raises(BadSample, match=rf"^row 1: column '{column}' holds list of None, expected text"):
        fields_of(kind, {**row, column: [None]})


@pytest.mark.parametrize("label", [1, 0.5, np.int64(1), np.uint8(1), np.float32(0.5), np.float64(0.5)])
def test_a_label_is_a_number_of_python_or_numpy(label):
    """A transform may return numpy's. Before, its integers and its float32 were refused."""
    assert fields_of("classification", {"text": "a", "label": label})["label"] == label


@pytest.mark.parametrize("label", [True, np.bool_(True), "1", None, np.array([1])])
def test_other_labels_are_refused(label):
    with pytest.raises(BadSample, match="label"):
        fields_of("classification", {"text": "a", "label": label})


@pytest.mark.parametrize("other", [{"conversations": []}, {"instruction": None}, {"input": [ASK]}])
def test_columns_of_a_pair_that_nothing_reads_are_ignored(other):
    """Before, an empty list counted as a second prompt, and an input was checked also without an instruction."""
    assert fields_of("preference", {"prompt": "Hi", **PAIR, **other})["chosen"] == [ASK, ANSWER]


def test_the_input_of_an_instruction_is_checked():
    with pytest.raises(BadSample, match="row 1: column 'input' holds int, expected text"):
        fields_of("preference", {**PAIR, "instruction": "Hi", "input": 3})


def test_the_advice_for_two_prompts_also_fits_rows_of_a_transform():
    """Before, it was only to set `columns`, which is refused beside a transform."""
    with pytest.raises(
        WrongColumns, match=r"expected one of them\. To fix: .*, or let data.sources\[\].transform return only"
    ):
        fields_of("preference", {"prompt": "Hi", "instruction": "Hi", **PAIR})


@pytest.mark.parametrize(("one", "many"), [("image", "images"), ("video", "videos"), ("audio", "audios")])
def test_an_empty_text_is_no_item_beside_the_other_column_of_a_kind(one, many):
    """Before, it counted as an item, so the row was refused for two columns with media."""
    for media, used in (({one: "", many: ["a"]}, "a"), ({one: "a", many: [""]}, "a"), ({one: "", many: []}, "")):
        row = {"messages": [ASK, ANSWER], **media}
        assert fields_of("multimodal", row)[many] == [used]
