"""Verdicts on changed sources: drawn ones are refused or equal, and a generator that reads another source is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from patchgen import pipeline, upstream
from patchgen.commands.mutating import EQUAL, NOT_RUN, REFUSED, WRONG, summarise, try_mutants
from patchgen.mutation.draw import draw
from patchgen.runtime.verify.mutants import Judge


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_drawn_mutants_are_refused_or_equal(model: str):
    rows = list(try_mutants(model, seed=0, count=12))
    summary = summarise(rows)
    assert summary["wrong"] == []
    assert summary["verdicts"].get(EQUAL, 0) + summary["verdicts"].get(REFUSED, 0) == 12
    assert sum(row["verdict"] != NOT_RUN for row in rows) == 12


def test_a_generator_that_reads_another_source_is_wrong(monkeypatch):
    """The change of the mutant is left out of what is generated, as a pass that drops something would."""
    origin = upstream.load("llama")
    judge = Judge(origin)
    lines = judge.executed()
    generate = pipeline.generate
    monkeypatch.setattr(
        pipeline, "generate", lambda changed, config: generate(replace(changed, text=origin.text), config)
    )
    scaled = (m for m in draw(origin.text, 0, lambda a, b: any(a <= n <= b for n in lines)) if m.operator == "scaled")
    verdicts = [judge.verdict(mutant) for _, mutant in zip(range(4), scaled, strict=False)]
    assert WRONG in {verdict.kind for verdict in verdicts}, verdicts
    assert any("differs by" in verdict.detail for verdict in verdicts)
