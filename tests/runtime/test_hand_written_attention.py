"""Which attention is given the whole sequence, and the masks of a whole sequence that upstream drew on a slice of it."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from transformers.masking_utils import blockwise_overlay, chunked_causal_mask_function

from patchgen.runtime import attention, gathered_attention, mask_functions
from patchgen.runtime.verify.small_config import small_config

TWO = SimpleNamespace(sp=2, sp_rank=0)


@pytest.mark.parametrize(
    ("kind", "head", "taken"),
    [
        ("gptj", "GPTJForCausalLM", {"GPTJAttention"}),
        ("rembert", "RemBertForCausalLM", {"RemBertSelfAttention"}),
        ("llama", "LlamaForCausalLM", set()),  # transformers' table
        ("big_bird", "BigBirdForCausalLM", set()),  # a sparse form may stand in its place
    ],
)
def test_it_is_attention_of_its_own_code_in_whose_place_nothing_else_stands(kind, head, taken):
    attention.register()
    upstream = getattr(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), head)
    model = upstream._from_config(small_config(kind).config, attn_implementation="patchgen_eager")
    assert {type(one).__name__ for one in gathered_attention.attending_to_all(model)} == taken


@pytest.mark.parametrize(
    ("kind", "head", "taken"),
    [
        ("zaya", "ZayaForCausalLM", {"ZayaAttention"}),  # a convolution inside
        ("deepseek_v4", "DeepseekV4ForCausalLM", {"DeepseekV4Attention"}),  # an indexer and compressors inside
        ("minimax", "MiniMaxForCausalLM", {"MiniMaxAttention", "MiniMaxLightningAttention"}),
        (
            "recurrent_gemma",
            "RecurrentGemmaForCausalLM",
            {"RecurrentGemmaRecurrentBlock"},
        ),
        (
            "inkling2_text",
            "Inkling2ForCausalLM",
            {"Inkling2ShortConvolution", "Inkling2SlidingAttention", "Inkling2FullAttention"},
        ),
        ("rwkv", "RwkvForCausalLM", set()),  # mixes tokens by shifting them
    ],
)
def test_attention_recurrences_and_convolutions_mix_tokens_and_towers_are_left_out(kind, head, taken):
    attention.register()
    small = small_config(kind).config
    upstream = getattr(importlib.import_module(small.__module__.replace("configuration", "modeling")), head)
    model = upstream._from_config(small, attn_implementation="patchgen_eager")
    assert {type(one).__name__ for one in gathered_attention.mixing_tokens(model)} == taken


def _drawn(function, B: int, S: int) -> torch.Tensor:
    places = torch.meshgrid(torch.arange(B), torch.tensor(0), torch.arange(S), torch.arange(S), indexing="ij")
    return function(*places)


def test_chunks_begin_where_the_padding_in_front_of_the_whole_row_ends():
    """A slice of padding alone is not padding in front: upstream's count on the second slice, against that on whole rows."""
    padding = torch.ones(3, 8, dtype=torch.bool)
    padding[0, 3:] = padding[1, :5] = False
    in_front = (padding.cumsum(-1) == 0).sum(-1)
    expected = _drawn(chunked_causal_mask_function(3, in_front), 3, 8)
    for own in padding.chunk(2, dim=1):
        of_slice = chunked_causal_mask_function(3, (own.cumsum(-1) == 0).sum(-1))
        got = mask_functions.for_full_sequence(of_slice, 4, TWO.sp, padding)
        assert torch.equal(_drawn(got, 3, 8), expected)


def test_tokens_of_no_image_are_in_no_block_of_the_whole_and_others_must_be_told_whole():
    none = torch.full((1, 4), -1)
    whole = mask_functions.for_full_sequence(blockwise_overlay(none), 4, TWO.sp, None)
    assert not _drawn(whole, 1, 8).any()
    with pytest.raises(ValueError, match="looks up block_sequence_ids of 4 tokens, but the sequence has 8 over 2"):
        mask_functions.for_full_sequence(blockwise_overlay(torch.tensor([[-1, 0, 0, -1]])), 4, TWO.sp, None)
