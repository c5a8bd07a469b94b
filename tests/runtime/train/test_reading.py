"""Errors about data name their section, by one rule for all that reads evaluation data."""

from __future__ import annotations

import pytest

from patchgen.runtime.data import DataError
from patchgen.runtime.data.problems import FailedOnAnotherRank
from patchgen.runtime.train import reading


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("data.media has no such option", "eval_data.media has no such option"),
        (
            "x/data.jsonl:3: not readable. To fix: set data.on_bad",
            "eval_data: x/data.jsonl:3: not readable. To fix: set eval_data.on_bad",
        ),
        ("x: a data.kind", "eval_data: x: an eval_data.kind"),
        ("eval_data.kind is text", "eval_data.kind is text"),
    ],
)
def test_an_error_of_evaluation_data_names_that_section_once(error, told):
    with pytest.raises(DataError) as named, reading.naming_section("eval_data"), reading.naming_section("eval_data"):
        raise DataError(error)
    assert str(named.value) == told
    with pytest.raises(DataError) as named, reading.naming_section("data"):
        raise DataError(error)
    assert str(named.value) == error


def test_the_message_by_which_other_ranks_failures_are_known_is_kept():
    with pytest.raises(FailedOnAnotherRank) as kept, reading.naming_section("eval_data"):
        raise FailedOnAnotherRank
    assert str(kept.value) == FailedOnAnotherRank.MESSAGE
