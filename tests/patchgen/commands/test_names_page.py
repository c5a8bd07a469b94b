"""docs/names.md: what the records give, and types that the installed release has."""

from __future__ import annotations

import shutil

import pytest
import transformers

from patchgen import provenance, upstream
from patchgen.commands import examination, names_page
from patchgen.runtime.compatibility import digest
from patchgen.runtime.verify import code_sets, records, source_keys
from patchgen.runtime.verify.committed_models import docs


def test_the_page_is_what_names_and_records_give():
    assert (docs() / "names.md").read_text(encoding="utf-8") == names_page.page()


def test_every_type_is_one_of_the_release():
    from transformers import CONFIG_MAPPING

    assert not [kind for _, kind, _ in names_page.NAMES if kind not in CONFIG_MAPPING]


def test_names_without_a_mark_are_in_the_source_of_their_type():
    """Of the installed release: docstrings and checkpoints of its own files."""
    release = upstream.open_release()
    for names, kind, _ in names_page.NAMES:
        confirmed = [name for name in names.partition(" (")[0].split(", ") if not name.endswith("*")]
        texts = [release.read(f"models/{kind}/{part}_{kind}.py") or "" for part in ("modeling", "configuration")]
        assert not [name for name in confirmed if name.lower() not in "".join(texts).lower()], kind


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A root with one committed model, and the record: rows of it and of a type without a file, proven now on two ranks."""
    root = tmp_path / "generated_models"
    shutil.copytree(provenance.generated_root() / "llama", root / "llama")
    before = records.read(records.path_in(None))[False, "llama"]
    monkeypatch.setattr(provenance, "generated_root", lambda: root)
    monkeypatch.setattr(names_page, "NAMES", (("Llama-3*", "llama", ""), ("Kimi-Linear", "kimi_linear", "FP8")))
    file, code, releases = root / "llama" / "modeling_llama.py", {"patchgen.runtime.ops:"}, source_keys.versions()
    made = code_sets.made_with(code, releases)
    proof = code_sets.read(root / "llama" / "verify.json") | {"sha256": digest(file), "status": "proven"}
    proof |= {"made_with": made, "two_ranks": {"layouts": {}, "made_with": made}}
    (root / "llama" / "verify.json").write_text(code_sets.dumps(proof, indent=1))
    rows = []
    for kind, text in (("llama", file.read_text(encoding="utf-8")), ("kimi_linear", "not committed")):
        generated = examination.digest(text)
        on_ranks = records.cell_made_with(generated, code, releases, records.separates_documents(before))
        cell = {"difference": 1e-6, "reason": "", "applies": True, "made_with": on_ranks}
        row = {**before, "model_type": kind, "status": "proven", "reason": ""}
        row |= {"made_with": records.row_made_with(generated, code, releases)}
        rows.append({**row, "ranks": dict.fromkeys(records.LAYOUTS, cell)})
    path = records.path_in(None)
    path.parent.mkdir()
    path.write_text(code_sets.dumps({"key": {}, "rows": rows}, indent=1))
    return file, path


def test_what_holds_is_told_with_its_differences(planted):
    assert lines() == [
        r"| Llama-3\* | `llama` | yes | proven | 1e-06 | 1e-06 | 1e-06 |  |",
        "| Kimi-Linear | `kimi_linear` |  | proven | 1e-06 | 1e-06 | 1e-06 | FP8 |",
    ]


def test_a_committed_model_whose_text_changed_is_stale_and_shows_no_status_of_another_text(planted):
    """Against the same page before: only its line differs."""
    file, _ = planted
    file.write_text(file.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    assert lines()[0] == r"| Llama-3\* | `llama` | yes | stale | stale | stale | stale |  |"
    assert "proven" in lines()[1]


@pytest.mark.parametrize("what", ["row", "ranks"])
def test_a_record_of_another_release_is_stale(planted, what):
    """In one process, with comparisons on ranks that hold still; and on ranks, which a proven status needs."""
    _, path = planted
    record = code_sets.read(path)
    row = record["rows"][1]
    for made in [row["made_with"]] if what == "row" else [cell["made_with"] for cell in row["ranks"].values()]:
        made["torch"] = "0.1"
    path.write_text(code_sets.dumps(record, indent=1))
    cells = "1e-06 | 1e-06 | 1e-06" if what == "row" else "stale | stale | stale"
    assert lines()[1] == f"| Kimi-Linear | `kimi_linear` |  | stale | {cells} | FP8 |"
    assert "proven" in lines()[0]


@pytest.mark.parametrize(
    ("cell", "told"),
    [({"difference": None, "reason": "refused: ..."}, "no"), ({"applies": False}, ""), (None, "")],
)
def test_a_layout_that_a_run_refuses_is_told_and_one_that_does_not_apply_is_empty(planted, cell, told):
    _, path = planted
    record = code_sets.read(path)
    ranks = record["rows"][0]["ranks"]
    if cell is None:
        del ranks["ep2"]
    else:
        ranks["ep2"] = {**ranks["ep2"], **cell}
    path.write_text(code_sets.dumps(record, indent=1))
    assert lines()[0].split("|")[7].strip() == told


def test_the_page_names_the_release_and_what_was_mended(planted):
    file, _ = planted
    proof = code_sets.read(file.with_name("verify.json")) | {"mended": ["LlamaMLP.forward"]}
    file.with_name("verify.json").write_text(code_sets.dumps(proof, indent=1))
    page = names_page.page()
    assert f"with transformers {transformers.__version__}:" in page
    assert "| proven[^llama] |" in page and page.endswith("\n[^llama]: upstream mended: LlamaMLP.forward\n")


def lines() -> list[str]:
    """The rows of the table."""
    return [line for line in names_page.page().splitlines() if line.startswith("| ")][2:]
