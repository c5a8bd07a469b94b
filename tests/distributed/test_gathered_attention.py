"""Attention that heads cannot divide, computed on gathered sequences by ranks that share one."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from patchgen import pipeline, provenance, upstream
from patchgen.runtime import attention, gathered_attention, parallel
from patchgen.runtime.verify.layout import TWO_RANKS
from patchgen.runtime.verify.slices import fake_rank
from patchgen.runtime.verify.small_config import small_config
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


def test_a_mask_that_the_caller_draws_for_a_slice_is_refused():
    """Before anything is sent: in torch's fake group."""
    attention.register()
    module = importlib.import_module("transformers.models.deepseek_v32.modeling_deepseek_v32")
    model = module.DeepseekV32ForCausalLM._from_config(
        small_config("deepseek_v32").config, attn_implementation="patchgen_eager"
    )
    ids, mask = torch.ones(1, 8, dtype=torch.long), torch.zeros(1, 1, 8, 8)
    refusal = r"DeepseekV32Attention is computed on the full sequence, but its attention_mask \(1, 1, 8, 8\)"
    with fake_rank() as state, parallel.using(state), pytest.raises(attention.UnsupportedError, match=refusal):
        model(input_ids=ids, attention_mask=mask, use_cache=False)


class Mixer(nn.Module):
    def forward(
        self, hidden_states, key_hidden_states, table, states=None, conv_mask=None, encoder_hidden_states=None
    ):
        return hidden_states


@pytest.mark.parametrize(
    ("name", "shape"),
    [("states", (2, 5, 8)), ("encoder_hidden_states", (2, 7, 8)), ("conv_mask", (2, 1, 5, 5))],
)
def test_what_one_rank_may_lack_is_not_gathered(name, shape):
    """Else ranks would wait for each other. Tensors that every call passes, and masks of tokens, are."""
    required = {
        "hidden_states": torch.ones(2, 5, 8),
        "key_hidden_states": torch.ones(2, 5, 6),
        "table": torch.ones(2, 9),
    }
    known = required | {
        "conv_mask": torch.ones(2, 5),
        "states": torch.ones(2, 10, 8),
    }  # of the full length: made in a layer before
    dims = gathered_attention._token_dims(Mixer(), known, ["conv_mask"])
    assert {key for key in dims if key in known} == {"hidden_states", "key_hidden_states", "conv_mask"}
    with pytest.raises(attention.UnsupportedError, match=f"Mixer is computed on the full sequence, but its {name}"):
        gathered_attention._token_dims(Mixer(), required | {name: torch.ones(shape)}, ["conv_mask"])
