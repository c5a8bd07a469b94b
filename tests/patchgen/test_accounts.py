"""What generation gives for types beside the committed ones is what `data/accounts` records.

The types were chosen so that together, in the least time, they execute nearly all statements of the anatomy and the passes.
An empty file there makes another type one of them, once `make accounts` has run.
"""

from __future__ import annotations

import dataclasses

import accounts
import pytest
from generation_cases import load

from patchgen import pipeline

FOLDER = accounts.DATA / "accounts"
TYPES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@pytest.mark.parametrize("model", TYPES)
@pytest.mark.sampled(3)
def test_generation_gives_what_is_recorded(model: str):
    accounts.compare(FOLDER / f"{model}.txt", accounts.account(load(model)), model)


def test_many_types_are_recorded():
    assert len(TYPES) > 30


def test_an_account_tells_of_a_note_a_hit_and_a_line():
    """The first line that differs is named."""
    generated = pipeline.generate(load("llama"))
    lines = accounts.account_of(generated)
    assert any(line.startswith("fused_loss: LlamaForCausalLM.forward: ") for line in lines)
    assert any(line.startswith("census: LlamaModel: ") for line in lines)
    assert "+from patchgen.runtime import ops" in lines
    step = generated.steps[3]
    noted = dataclasses.replace(step, outcome=dataclasses.replace(step.outcome, notes=("a note",)))
    other = dataclasses.replace(generated, steps=(*generated.steps[:3], noted, *generated.steps[4:]))
    told = accounts.first_difference(lines, accounts.account_of(other))
    assert f"found     {step.name}, note: a note" in told
    assert accounts.changes(generated, other) == [f"+{step.name}, note: a note"]
