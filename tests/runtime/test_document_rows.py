"""Documents of packed rows in rows of their own: the same numbers as each document alone, for models that mix tokens."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import CausalLMOutput

from patchgen.runtime import attention, model_calls, parallel, registry
from patchgen.runtime.document_rows import LEFT, DocumentRows
from patchgen.runtime.parallel.batch import IGNORED, slice_batch
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.slices import fake_rank
from patchgen.runtime.verify.small_config import small_config

LENGTHS = (7, 12, 5)
ROUNDING = 64 * torch.finfo(torch.float32).eps


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3), st.booleans())
def test_tokens_go_to_rows_of_their_document_and_come_back(documents, is_left):
    S = max(sum(lengths) for lengths in documents)
    documents = [[*lengths, S - sum(lengths)] if sum(lengths) < S else lengths for lengths in documents]
    lengths = [length for row in documents for length in row]
    B = len(documents)
    ids = torch.arange(1, B * S + 1).view(B, S)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    rows = DocumentRows.of(bounds, B, S, pads_left=is_left)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.stack([ids, 2 * ids, 3 * ids]),
        "inputs_embeds": ids[..., None].float().expand(B, S, 2),
        "pixel_values": torch.ones(3, 2),
        "cu_seq_lens_q": bounds,
    }
    apart = rows.unpack(batch)
    assert "cu_seq_lens_q" not in apart
    assert apart["pixel_values"] is batch["pixel_values"]
    for row, document in enumerate(ids.view(-1).split(lengths)):
        held = torch.arange(max(lengths)) < len(document)
        held = held.flip(0) if is_left else held
        assert torch.equal(rows.is_token[row], held)
        assert torch.equal(apart["input_ids"][row, held], document)
        assert torch.equal(apart["labels"][row, held], document)
        assert (apart["labels"][row, ~held] == IGNORED).all()
        assert torch.equal(apart["position_ids"][1, row, held], 2 * document)
        assert torch.equal(apart["inputs_embeds"][row, held, 1], document.float())
    if len(set(lengths)) > 1:
        assert int(apart["real_tokens"].sum()) == B * S
    together = rows.repack(CausalLMOutput(logits=apart["inputs_embeds"], loss=torch.tensor(1.0)))
    assert torch.equal(together.logits, batch["inputs_embeds"])


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("mamba", "MambaForCausalLM"),
        ("jamba", "JambaForCausalLM"),
        ("rwkv", "RwkvForCausalLM"),
        ("roformer", "RoFormerForCausalLM"),
        ("bloom", "BloomForCausalLM"),
    ],
)
def test_packed_rows_are_each_document_alone(kind, head):
    """Logits, loss and every gradient, of models most of which read across documents otherwise."""
    attention.register()
    cls = getattr(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), head)
    config = small_config(cls.config_class).config
    expected = build_model(cls, config)
    perturb(expected)
    own = cls._from_config(copy.deepcopy(config), attn_implementation="patchgen_sdpa", experts_implementation="eager")
    own.load_state_dict(expected.state_dict())
    model_calls.separate_documents(own.train())
    ids = torch.randint(3, 60, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    batch = slice_batch({"input_ids": ids, "labels": ids.clone(), "position_ids": positions}, sp=1, sp_rank=0)
    items = torch.tensor(sum(LENGTHS) - len(LENGTHS))
    got = own(**batch, num_items_in_batch=items, use_cache=False)
    got.loss.backward()
    parts = [
        expected(input_ids=part, labels=part, num_items_in_batch=items, use_cache=False)
        for part in ids.split(LENGTHS, dim=1)
    ]
    sum(part.loss for part in parts).backward()
    logits = torch.cat([part.logits for part in parts], dim=1)
    assert (got.logits - logits).abs().max() < ROUNDING * logits.abs().max()
    largest = max(p.grad.norm() for p in expected.parameters() if p.grad is not None)
    for (key, mine), theirs in zip(own.named_parameters(), expected.parameters(), strict=True):
        if theirs.grad is not None:
            assert (mine.grad - theirs.grad).norm() < ROUNDING * max(theirs.grad.norm(), 1e-2 * largest), key


def test_a_padding_mask_is_refused():
    attention.register()
    config = small_config("bloom").config
    model = importlib.import_module("transformers.models.bloom.modeling_bloom").BloomForCausalLM._from_config(
        config, attn_implementation="patchgen_sdpa"
    )
    model_calls.separate_documents(model)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="BloomForCausalLM got both cu_seq_lens_q and a padding mask"):
        model(input_ids=torch.ones(1, 8, dtype=torch.long), attention_mask=torch.ones(1, 8), cu_seq_lens_q=bounds)


def test_a_slice_of_rows_is_refused_packed_or_not():
    """One of two ranks, in torch's fake group."""
    attention.register()
    module = importlib.import_module("transformers.models.mamba.modeling_mamba")
    model = module.MambaForCausalLM(small_config("mamba").config)
    model_calls.separate_documents(model)
    positions = torch.arange(16)[None]
    with fake_rank() as state, parallel.using(state):
        for counted in (positions, positions % 5):
            batch = slice_batch({"input_ids": torch.ones_like(counted), "position_ids": counted}, sp=2, sp_rank=0)
            with pytest.raises(
                ValueError, match=r"MambaForCausalLM computes each document .* a slice of the rows .sp=2"
            ):
                model(**batch)


def test_a_model_that_looks_ahead_is_told_of_padding_before_its_tokens():
    """Logits of packed rows are those of each document alone, and with padding behind the tokens they are not."""
    attention.register()
    cls = importlib.import_module("transformers.models.xlnet.modeling_xlnet").XLNetLMHeadModel
    config = small_config(cls.config_class).config
    expected = build_model(cls, config)
    perturb(expected)
    ids = torch.randint(3, 60, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    batch = slice_batch({"input_ids": ids, "position_ids": positions}, sp=1, sp_rank=0)
    with torch.no_grad():
        alone = torch.cat([expected(input_ids=part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
        differences = []
        for how in (LEFT, True):
            own = cls._from_config(copy.deepcopy(config), attn_implementation="patchgen_sdpa").eval()
            own.load_state_dict(expected.state_dict())
            model_calls.separate_documents(own, how)
            differences.append((own(**batch).logits - alone).abs().max() / alone.abs().max())
    assert differences[0] < ROUNDING < differences[1]


@pytest.mark.parametrize(
    ("name", "built_by", "name_of_attention"),
    [
        ("deepseek_v4", "class", "patchgen_eager"),
        ("deepseek_v4", "registry", "patchgen_eager"),
        ("deepseek_v4", "registry", "eager"),
        ("glm_moe_dsa", "class", "patchgen_sdpa"),
    ],
)
def test_what_a_proof_says_of_documents_holds_without_a_recipe(name, built_by, name_of_attention):
    """Other trainers call `slice_batch` and the model: packed rows have the logits of each document alone."""
    attention.register()
    config = small_config(name).config
    make = registry.find_head(config)._from_config if built_by == "class" else registry.build_model
    model = make(copy.deepcopy(config), attn_implementation=name_of_attention).eval()
    perturb(model)
    ids = torch.randint(3, 60, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    batch = slice_batch({"input_ids": ids, "position_ids": positions}, sp=1, sp_rank=0)
    with torch.no_grad():
        found = model(**batch, use_cache=False).logits
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
    alone = torch.cat(alone, dim=1)
    assert (found - alone).abs().max() < ROUNDING * alone.abs().max()


@pytest.mark.parametrize(("built_by", "name_of_attention"), [("class", "patchgen_eager"), ("registry", "eager")])
def test_what_a_proof_says_of_documents_is_refused_on_slices(built_by, name_of_attention):
    """In the words of the recipe's refusal: where nothing was decided for the model nobody compares slices, and upstream's
    attention is given no full sequences."""
    attention.register()
    config = small_config("deepseek_v4").config
    make = registry.find_head(config)._from_config if built_by == "class" else registry.build_model
    model = make(config, attn_implementation=name_of_attention)
    positions = torch.arange(16)[None] % 5
    with fake_rank() as state, parallel.using(state):
        batch = slice_batch({"input_ids": torch.ones_like(positions), "position_ids": positions}, sp=2, sp_rank=0)
        with pytest.raises(ValueError) as refusal:
            model(**batch)
    assert str(refusal.value) == model_calls.no_slices("DeepseekV4ForCausalLM", 2)


def test_on_slices_a_decision_is_made_before_the_first_call_and_padding_is_refused():
    attention.register()
    config = small_config("gpt_neo").config
    cls = importlib.import_module("transformers.models.gpt_neo.modeling_gpt_neo").GPTNeoForCausalLM
    model = cls._from_config(config, attn_implementation="patchgen_eager")
    model_calls.separate_documents(model)
    positions = torch.arange(16)[None] % 5
    with fake_rank() as state, parallel.using(state), torch.no_grad():
        batch = slice_batch({"input_ids": torch.ones_like(positions), "position_ids": positions}, sp=2, sp_rank=0)
        with pytest.raises(ValueError, match="GPTNeoForCausalLM got both cu_seq_lens_q and a padding mask"):
            model(**batch, attention_mask=torch.ones(1, 8))
        model(**batch)
        model_calls.separate_documents(model)
        with pytest.raises(
            RuntimeError, match="was called on a slice of a sequence before separate_documents.model, False"
        ):
            model_calls.separate_documents(model, False)


def test_a_decision_outweighs_the_proof():
    """As a recipe with another attention may decide, or a proof that is being made."""
    attention.register()
    model = registry.build_model(small_config("deepseek_v4").config, attn_implementation="eager").eval()
    ids, positions = torch.arange(3, 19)[None], torch.arange(16)[None] % 8
    batch = slice_batch({"input_ids": ids, "position_ids": positions}, sp=1, sp_rank=0)
    with torch.no_grad():
        apart = model(**batch, use_cache=False).logits
        model_calls.separate_documents(model, False)
        together = model(**batch, use_cache=False).logits
    assert not torch.allclose(apart, together, atol=1e-6)
