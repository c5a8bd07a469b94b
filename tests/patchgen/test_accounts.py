"""What generation gives for types beside the committed ones is what `data/accounts` records.

The types were chosen so that together, in the least time, they execute nearly all statements of the anatomy and the passes.
"""

from __future__ import annotations

import dataclasses

import accounts
import pytest
from generation_cases import load

from patchgen import pipeline

FOLDER = accounts.DATA / "accounts"
TYPES = """
    afmoe bloom falcon florence2 fun_asr_nano gemma4_unified_assistant git glmasr glmga granite4_vision granite_docling
    hrm_text hunyuan_vl idefics inkling2 inkling_text instructblipvideo kimi_k25 lfm3_vl llama4_text minicpmv4_6
    minimax_m3_vl modernbert-decoder mpt nemo_speechlm nemotron_h nemotron_h_omni openai-gpt plbart qwen2_5_omni_thinker
    qwen3_asr
""".split()


@pytest.mark.parametrize("model", TYPES)
def test_generation_gives_what_is_recorded(model: str):
    accounts.compare(FOLDER / f"{model}.txt", accounts.account(load(model)), model)


def test_nothing_else_is_recorded():
    assert {path.stem for path in FOLDER.iterdir()} == set(TYPES)


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
