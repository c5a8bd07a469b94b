"""docs/names.md: what the records give, and types that the installed release has."""

from __future__ import annotations

from patchgen.commands import names_page
from patchgen.runtime.verify.committed_models import docs


def test_the_page_is_what_names_and_records_give():
    assert (docs() / "names.md").read_text(encoding="utf-8") == names_page.page()


def test_every_type_is_one_of_the_release():
    from transformers import CONFIG_MAPPING

    assert not [kind for _, kind, _ in names_page.NAMES if kind not in CONFIG_MAPPING]


def test_a_layout_that_a_run_refuses_is_told_and_one_that_does_not_apply_is_empty():
    cells = [
        {"difference": 1e-6, "reason": ""},
        {"difference": None, "reason": "refused: ..."},
        {"applies": False},
        None,
    ]
    assert [names_page._cell(cell) for cell in cells] == ["1e-06", "no", "", ""]
