"""A round keeps what it found, goes on where it stopped, and its table says what its rows say."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from patchgen.mutation import rounds, table
from patchgen.mutation.rounds import EQUAL, NOT_RUN, REFUSED, TOLD, WRONG
from patchgen.runtime.verify.committed_models import page_of, records_folder

ROW = {
    "model": "one",
    "seed": 0,
    "operator": "scaled",
    "keeps_meaning": False,
    "where": "A.f line 1",
    "change": "x -> y",
}


def row(mutant: str, verdict: str, **facts: object) -> dict:
    return {**ROW, "mutant": mutant, "verdict": verdict, "by": "", "detail": "", "code": "now", **facts}


def test_the_last_row_of_a_mutant_counts_and_a_wrong_one_of_other_code_is_tried_again(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    rows = [row("a", WRONG), row("a", EQUAL), row("b", WRONG, code="before"), row("c", WRONG), row("d", NOT_RUN)]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert {(one["mutant"], one["verdict"]) for one in rounds.read(file, "now")} == {
        ("a", EQUAL),
        ("c", WRONG),
        ("d", NOT_RUN),
    }
    assert rounds.read(tmp_path / "nothing", "now") == rounds.read(None, "now") == []


def test_a_round_that_has_all_its_rows_starts_no_process(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    kept = [row(name, EQUAL) for name in "abc"]
    file.write_text("".join(json.dumps(one) + "\n" for one in kept))
    assert list(rounds.run(["one"], 3, 0, 1, ranks=False, records=file)) == kept


def test_the_table_counts_what_the_rows_say():
    rows = [
        row("a", EQUAL, ranks=EQUAL),
        row("b", REFUSED, by="fused_loss"),
        row("c", WRONG, detail="loss differs"),
        row("d", NOT_RUN),
        row("e", REFUSED, by="prune", operator="commuted", keeps_meaning=True),
        row("f", EQUAL, operator="commuted", keeps_meaning=True, model="two"),
        row("g", TOLD, by="two ranks", ranks=TOLD),
        row("h", TOLD, by="an observed fact"),
    ]
    summary = table.summarise(rows)
    assert summary["verdicts"] == {EQUAL: 2, REFUSED: 2, TOLD: 2, WRONG: 1, NOT_RUN: 1}
    assert summary["keeping_meaning"] == {REFUSED: 1, EQUAL: 1}
    assert summary["operators"]["commuted"] == {REFUSED: 1, EQUAL: 1}
    assert summary["refused_by"] == {"fused_loss": {"scaled": 1}, "prune": {"commuted": 1}}
    assert summary["told_by"] == {"two ranks": 1, "an observed fact": 1}
    assert summary["ranks"] == {EQUAL: 1, TOLD: 1} and summary["codes"] == {"now": 7}
    assert [one["mutant"] for one in summary["wrong"]] == ["c"]
    text = table.page({"date": "2026-01-02", "versions": {"transformers": "5", "torch": "2"}, **summary})
    assert "7 changed forms" in text and "nothing tells it: 1." in text and "1 are refused (50.0 %)" in text
    assert "| commuted (keeps the meaning) | 1 |  | 1 |  |  |" in text and "mutant c: scaled" in text


def test_the_committed_page_is_that_of_the_committed_record():
    path = records_folder() / "mutations.json"
    record = json.loads(path.read_text())
    assert page_of(path).read_text() == table.page(record)
    assert record["wrong"] == [] and record["verdicts"].get(WRONG, 0) == 0
    kept = record["keeping_meaning"]
    assert kept.get(REFUSED, 0) <= 0.2 * sum(kept.values())


def out_of_memory() -> None:
    rounds.limit_memory(4 << 30)
    bytearray(8 << 30)


def test_a_mutant_that_asks_for_all_memory_ends_in_an_error_of_its_own():
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool, pytest.raises(MemoryError):
        pool.submit(out_of_memory).result()


def test_a_process_that_was_killed_ends_the_round():
    """It puts no message into the queue, so nothing else would."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        killed = pool.submit(os._exit, 9)
        with pytest.raises(BrokenProcessPool):
            rounds._next_message(queue.Queue(), [killed], seconds=0.1)
