"""What is not sequence-parallel says so: real models, of each kind one, and the notes that they carry."""

from __future__ import annotations

import pytest
from generation_cases import load

from patchgen import pipeline

NOTES = {
    "bloom": "BloomForCausalLM: BloomModel takes no position ids: not sequence-parallel",
    "mpt": "MptForCausalLM: MptModel takes no position ids: not sequence-parallel",
    "roberta": "RobertaForCausalLM: no decoder of this file is below it",
    "gptj": "GPTJAttention: hand-written softmax(q k) v",
    "reformer": "ReformerModelWithLMHead: no decoder of this file is below it",
    "xlstm": "xLSTMForCausalLM: xLSTMModel takes no position ids",
}


@pytest.mark.parametrize("model", sorted(NOTES))
def test_a_model_without_sequence_parallel_form_carries_a_note(model: str):
    notes = notes_of(model)
    assert len(notes) == len(set(notes))
    assert any(note.startswith(NOTES[model]) for note in notes), notes


@pytest.mark.parametrize("model", ["bart", "llama", "qwen3_next"])
def test_a_served_model_carries_none(model: str):
    assert notes_of(model) == []


def notes_of(model: str) -> list[str]:
    steps = pipeline.generate(load(model)).steps
    return [note for s in steps if s.name in ("language_sp", "mixer_sp") for note in s.outcome.notes]
