"""The sweep of heads: a row per class, a record that says what holds, a page that follows from it."""

from __future__ import annotations

import pytest
from invoked import invoke

from patchgen import upstream, wheels
from patchgen.commands import head_sweep, own_process
from patchgen.errors import ConfigError
from patchgen.runtime.verify import head_kinds

HEADS = {"conditional": "T5ForConditionalGeneration", "classification": "T5ForSequenceClassification"}


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return head_sweep.examine("t5", HEADS, wheels.installed_version())


@pytest.mark.slow
def test_an_encoder_decoder_is_proven_with_its_own_loss(rows):
    assert {row["kind"]: (row["status"], row["reason"]) for row in rows}["conditional"] == ("proven", "")


def test_types_are_stale_after_a_new_head_or_another_prover(rows, tmp_path):
    path, release = tmp_path / head_sweep.FILE, upstream.open_release()
    head_sweep.write(path, {(row["model_type"], row["kind"]): row for row in rows})
    assert head_sweep.stale_types(path, release, {"t5": HEADS}) == []
    assert head_sweep.stale_types(path, release, {"t5": HEADS | {"base": "T5Model"}}) == ["t5"]
    other = {**rows[0], "made_with": {**rows[0]["made_with"], "prover": "another"}}
    head_sweep.write(path, {("t5", row["kind"]): row for row in (other, rows[1])})
    assert head_sweep.stale_types(path, release, {"t5": HEADS}) == ["t5"]


def test_rows_that_stay_get_the_hash_of_todays_sources(rows, tmp_path, monkeypatch):
    """Without it, each check would generate their heads again. Their text is the same, so they are not proven again."""
    path, release = tmp_path / head_sweep.FILE, upstream.open_release()
    head_sweep.write(path, {("t5", row["kind"]): {**row, "sources": "of another generator"} for row in rows})
    monkeypatch.setattr(head_sweep, "heads_of", lambda _release: {"t5": HEADS})
    assert head_sweep.sweep(1, release.version, ["t5"], tmp_path, fresh=False) in (0, 1)
    found = head_sweep.read(path)
    assert found == {("t5", row["kind"]): row for row in rows}


def test_a_fresh_sweep_of_one_type_keeps_the_rows_of_others(rows, tmp_path, monkeypatch):
    path, release = tmp_path / head_sweep.FILE, upstream.open_release()
    other, gone = ({**rows[0], "model_type": name, "head": f"{name}Head"} for name in ("other", "gone"))
    head_sweep.write(path, {(row["model_type"], row["kind"]): row for row in (*rows, other, gone)})
    heads = {"t5": HEADS, "other": {other["kind"]: other["head"]}}
    monkeypatch.setattr(head_sweep, "heads_of", lambda _release: heads)
    monkeypatch.setattr(own_process, "run_each", lambda _, calls, __: ((name, rows) for name in calls))
    head_sweep.sweep(1, release.version, ["t5"], tmp_path, fresh=True)
    assert head_sweep.read(path).keys() == {("other", other["kind"]), *(("t5", row["kind"]) for row in rows)}


def test_the_page_counts_what_is_proven_and_names_the_rest(rows):
    failed = {**rows[1], "status": "failed", "reason": "a reason of its own"}
    page = head_sweep.page([rows[0], failed])
    assert "conditional: 1 of 1" in page and "classification: 0 of 1" in page
    assert f"- `{failed['head']}`: a reason of its own" in page


def test_heads_are_those_of_types_that_take_text():
    found = head_sweep.heads_of(upstream.open_release())
    assert found["llama"]["token"] == "LlamaForTokenClassification" and found["bert"]["base"] == "BertModel"
    assert "vit" not in found and found["bart"]["conditional"] == "BartForConditionalGeneration"
    for kind in ("classification", "token", "base"):
        assert sum(kind in heads for heads in found.values()) >= 60


def test_the_kinds_are_those_of_the_prover():
    assert head_sweep.MAPPINGS == head_kinds.MAPPINGS


def test_a_type_without_such_heads_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="--only vit: transformers .* has no head of these kinds for that type"):
        invoke("sweep", "--family", "heads", "--only", "vit", "--output", str(tmp_path))


def test_the_error_of_a_dead_process_names_its_type_and_what_to_do(tmp_path, monkeypatch):
    died = own_process.ProcessDied(f"t5: {own_process.DIED}")
    monkeypatch.setattr(own_process, "run_each", lambda *_: iter([("t5", died)]))
    with pytest.raises(ConfigError, match=r"t5: its process died .*To fix: free memory"):
        invoke("sweep", "--family", "heads", "--only", "t5", "--output", str(tmp_path))
