"""Pages that are written from records say what the records say."""

from __future__ import annotations

import json

import pytest

from patchgen.commands import records, support_matrix
from patchgen.errors import PatchgenError


def test_the_matrix_is_what_the_records_say():
    text = (support_matrix.docs() / "parallel.md").read_text(encoding="utf-8")
    assert text == support_matrix.page(text), "write it again: python -m patchgen.commands.support_matrix"


def test_the_counts_of_the_readme_are_those_of_the_record():
    text = (support_matrix.docs().parent / "README.md").read_text(encoding="utf-8")
    assert text == support_matrix.readme(text), "write it again: python -m patchgen.commands.support_matrix"


def test_the_page_of_coverage_is_what_the_records_say():
    docs = support_matrix.docs()
    record = json.loads((docs / "coverage.json").read_text(encoding="utf-8"))
    expected = records.page(record["key"], record["rows"])
    assert (docs / "coverage.md").read_text(encoding="utf-8") == expected, "write it again: patchgen sweep"


def test_a_page_without_marks_is_refused():
    with pytest.raises(PatchgenError, match="has lost its marks"):
        support_matrix.page("# Training on many ranks")
    with pytest.raises(PatchgenError, match="has lost its marks"):
        support_matrix.readme("# patchgen")
