"""Attention that heads cannot divide, computed on gathered sequences by ranks that share one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from patchgen import pipeline, provenance, upstream
from patchgen.runtime import gathered_attention
from patchgen.runtime.verify.layout import TWO_RANKS
from patchgen.runtime.verify.two_ranks import compare


def test_attention_written_by_hand_agrees_with_upstream_on_one_rank(two_ranks, tmp_path):
    """Loss and every gathered gradient, plain and packed."""
    folder = tmp_path / "gpt_neo"
    provenance.write(pipeline.generate(upstream.load("gpt_neo")), folder)
    row, _ = two_ranks.run(compare, folder, "GPTNeoForCausalLM", TWO_RANKS["sp2"])
    assert row.get("reason", "") == "" and row["packed_gradients"] < 1e-4, row


GENERATED = Path(__file__).parents[2] / "generated_models"


@pytest.mark.parametrize(
    ("name", "head", "in_rows"),
    [
        ("deepseek_v32", "DeepseekV32ForCausalLM", False),  # an indexer in each layer
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", False),  # layers that take the keys of the layer before
        ("inkling_text", "InklingForCausalLM", False),  # a bias for each token
        ("deepseek_v4", "DeepseekV4ForCausalLM", True),  # keys compressed by blocks of a row
        ("zaya", "ZayaForCausalLM", True),  # a convolution without bounds
        (
            "inkling2_text",
            "Inkling2ForCausalLM",
            True,
        ),  # keys and values of other hidden states, convolutions beside attention
        pytest.param("recurrent_gemma", "RecurrentGemmaForCausalLM", True, marks=pytest.mark.slow),
        pytest.param("minimax", "MiniMaxForCausalLM", True, marks=pytest.mark.slow),
        pytest.param("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", True, marks=pytest.mark.slow),
    ],
)
def test_attention_that_heads_cannot_divide_agrees_with_upstream_on_one_rank(two_ranks, tmp_path, name, head, in_rows):
    """Loss and every gradient, plain and packed."""
    folder = GENERATED / name
    if not folder.is_dir():
        folder = tmp_path / name
        provenance.write(pipeline.generate(upstream.load(name)), folder)
    row, _ = two_ranks.run(partial(compare, separates=in_rows), folder, head, TWO_RANKS["sp2"])
    assert row.get("reason", "") == "" and max(row["gradients"], row["packed_gradients"]) < 1e-4, row


def test_what_a_run_would_refuse_at_its_start_is_not_proven_on_ranks(two_ranks, tmp_path):
    """Mixes tokens in evaluation alone: the compared step agrees, the check of slices does not."""
    provenance.write(pipeline.generate(upstream.load("gpt_neo")), tmp_path)
    file = tmp_path / "modeling_gpt_neo.py"
    norm = "hidden_states = self.ln_f(hidden_states)"
    text = file.read_text()
    assert text.count(norm) == 1
    mixed = f"{norm}\n        if not self.training:\n            hidden_states = hidden_states.roll(1, 1)"
    file.write_text(text.replace(norm, mixed))
    row, _ = two_ranks.run(compare, tmp_path, "GPTNeoForCausalLM", TWO_RANKS["sp2"])
    assert "refused at the start of a run: GPTNeoForCausalLM computes other" in row["reason"], row


class Indexer(nn.Module):
    def forward(self, hidden_states, attention_mask):
        return attention_mask.bool()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.indexer = Indexer()

    def forward(self, hidden_states, attention_mask):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self, hidden_states, self.indexer(hidden_states, attention_mask))


def test_an_indexer_of_an_attention_is_no_attention_of_its_own():
    """What it gives is a mask, of which no slice of tokens is cut: the attention around it gets the full sequence."""
    attention = Attention()
    assert not gathered_attention._is_hand_written(attention.indexer, attention)
    assert gathered_attention._is_hand_written(attention.indexer, nn.ModuleList([attention.indexer]))
    assert gathered_attention._selects_keys(attention) and not gathered_attention._selects_keys(attention.indexer)
