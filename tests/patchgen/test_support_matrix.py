"""Pages that are written from records say what the records say."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from patchgen import provenance
from patchgen.commands import models_page, proof, support_matrix
from patchgen.errors import PatchgenError
from patchgen.runtime.verify import code_sets, records

if TYPE_CHECKING:
    from patchgen.runtime.verify.committed_models import CommittedModel


def test_the_matrix_is_what_the_records_say():
    text = (support_matrix.docs() / "parallel.md").read_text(encoding="utf-8")
    assert text == support_matrix.page(text), "write it again: python -m patchgen.commands.support_matrix"


def test_the_counts_of_the_readme_are_those_of_the_record():
    text = (support_matrix.docs().parent / "README.md").read_text(encoding="utf-8")
    assert text == support_matrix.readme(text), "write it again: python -m patchgen.commands.support_matrix"


def test_the_page_of_coverage_is_what_the_records_say():
    docs = support_matrix.docs()
    record = code_sets.read(records.path_in(None))
    expected = records.page(record["key"], record["rows"])
    assert (docs / "coverage.md").read_text(encoding="utf-8") == expected, "write it again: patchgen sweep"


def test_pages_mark_what_was_compared_with_a_mended_upstream(monkeypatch):
    """A row with `mended` has a footnote at its status, which names the method; without, the page is as it was."""
    record = code_sets.read(records.path_in(None))
    rows = [row for row in record["rows"] if row["model_type"] in ("llama", "qwen3_vl")]
    rows = [{key: value for key, value in row.items() if key != "mended"} for row in rows]
    assert "[^" not in records.page(record["key"], rows)
    mended = [{**row, "mended": ["A.forward"]} for row in rows]
    page = records.page(record["key"], mended)
    for row in mended:
        assert f"| {row['model_type']} | " in page and f"[^{row['model_type']}] |" in page
        assert page.count(f"\n[^{row['model_type']}]: upstream mended: A.forward ") == 1

    row = next(row for row in models_page.rows() if row["name"] == "llama")
    monkeypatch.setattr(models_page, "rows", lambda: [{**row, "status": "proven", "mended": ["A.forward"]}])
    page = models_page.models_page()
    assert "| proven[^llama] |" in page and page.count("\n[^llama]: upstream mended: A.forward ") == 1


def test_a_layout_is_refused_if_all_that_fails_in_it_is():
    equal, wrong = (
        {"loss": "0", "gradient": "2e-07"},
        {"loss": "nan", "gradient": "nan", "failed": "ValueError: 3 against 4"},
    )
    refused = wrong | {"failed": "patchgen.runtime.attention_masks.UnsupportedError: Train this model with sp=1."}
    apart = wrong | {"failed": "ValueError: Any computes each document in its own row. Train this model with sp=1."}
    layouts = {"e": [apart], "a": [equal, equal], "b": [equal, wrong], "c": [refused, refused], "d": [refused, wrong]}
    proofs = {name: {"cases": dict(enumerate(cases))} for name, cases in layouts.items()}
    found = models_page.rank_results(cast("CommittedModel", SimpleNamespace(current_rank_proofs=proofs)))
    assert found == {
        "a": "2e-07",
        "b": "1 of 2 failed",
        "c": "2 of 2 refused",
        "d": "2 of 2 failed",
        "e": "1 of 1 refused",
    }


def test_a_page_without_marks_is_refused():
    with pytest.raises(PatchgenError, match="should contain the markers"):
        support_matrix.page("# Training on many ranks")
    with pytest.raises(PatchgenError, match="should contain the markers"):
        support_matrix.readme("# patchgen")


@pytest.mark.parametrize("proven", [(), ("llama",), ("llama", "qwen3_vl")])
def test_a_table_without_current_records_says_so_in_words(proven, monkeypatch):
    """Of two models, neither, one and both have a comparison on ranks that is of the present file."""
    monkeypatch.setattr(support_matrix, "committed", lambda: ["llama", "qwen3_vl"])
    results = {name: {"sp2": "2e-07"} for name in proven}
    monkeypatch.setattr(support_matrix, "rank_results", lambda model: results.get(model.name, {}))
    text, media = support_matrix.support_matrix().split("The committed models with all inputs that they take:\n")
    assert "| llama |" in text and "qwen3_vl" not in text, "which has no row for text"
    assert "|  |" not in media
    assert ("\n| model | sp2 |\n| --- | ---: |\n| llama | 2e-07 |\n" in media) == bool(proven)
    told = {0: "\nNo current record.\n", 1: "\nNo current record: qwen3_vl.\n", 2: ""}[len(proven)]
    assert told in media and media.count("No current record") == bool(told)


@pytest.mark.parametrize("ranks", [False, True])
def test_to_verify_one_model_writes_no_page_about_others(ranks, tmp_path, monkeypatch):
    """Here its proof holds, so that it writes nothing at all; with all of them the pages are written."""
    root, docs = tmp_path / "generated_models", tmp_path / "docs"
    shutil.copytree(provenance.generated_root() / "llama", root / "llama")
    shutil.copytree(support_matrix.docs(), docs)
    shutil.copytree(records.path_in(None).parent, tmp_path / "records")
    monkeypatch.setattr(provenance, "generated_root", lambda: root)
    monkeypatch.setattr(records, "proof_holds", lambda *which, **key: True)
    before = {path.name: path.read_bytes() for path in docs.iterdir() if path.is_file()}

    def verify(models: list[str], *, every: bool) -> set[str]:
        what = {
            "every": every,
            "directory": None,
            "head": None,
            "outdated": True,
            "code": None,
            "generated_folder": None,
        }
        assert proof.verify(models, proof.Layout(2, sp=2) if ranks else None, **what) == 0
        pages = (path for path in docs.iterdir() if path.is_file())
        return {path.name for path in pages if path.read_bytes() != before.get(path.name)}

    assert verify(["llama"], every=False) == set()
    assert verify([], every=True) == {"models.md", "parallel.md", "names.md"}, "only one model is committed here"
