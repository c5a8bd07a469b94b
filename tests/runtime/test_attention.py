"""Our attention names in one process: against upstream's, packed, and what they refuse."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from rounding import require_as_exact, require_equal_up_to_rounding
from transformers import Gemma2Config, Gemma3Config, GptOssConfig, LlamaConfig, Qwen3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from patchgen.runtime import attention, attention_backends
from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.attention_calls import FLOAT32, Attention, Documents

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
}
IN_FP32 = [name for name, backend in BACKENDS.items() if backend.unavailable() is None and FLOAT32 in backend.features]


@pytest.fixture(scope="module", autouse=True)
def registered():
    attention.register()


def _logits(cls, config, name, dtype=torch.float32, **inputs):
    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
        return model.to(dtype)(**inputs).logits


def _require_upstreams_logits(cls, config, name, counts=..., exact_name="eager", **inputs):
    """Where they count, no further from upstream's logits in fp64 than its eager ones in fp32 are."""
    exact = _logits(cls, config, exact_name, torch.float64, **inputs)
    upstream = _logits(cls, config, "eager", **inputs)
    require_as_exact(_logits(cls, config, name, **inputs)[counts], upstream[counts], exact[counts], what=name)


IDS = torch.arange(1, 25)[None] % 40
PACKED = {
    "position_ids": torch.cat([torch.arange(9), torch.arange(15)])[None],
    "cu_seq_lens_q": torch.tensor([0, 9, 24], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 9, 24], dtype=torch.int32),
    "max_length_q": 15,
    "max_length_k": 15,
}


@pytest.mark.parametrize("name", IN_FP32)
@pytest.mark.parametrize("packing", ["none", "lengths", "positions"])
def test_logits_are_upstreams(name, packing):
    """Against upstream's own eager attention; packed rows by `cu_seq_lens` or by position ids alone."""
    inputs = {"none": {}, "lengths": PACKED, "positions": {"position_ids": PACKED["position_ids"]}}[packing]
    _require_upstreams_logits(Qwen3ForCausalLM, Qwen3Config(**SIZES), name, input_ids=IDS, **inputs)


@pytest.mark.parametrize("name", IN_FP32)
def test_padded_rows_are_upstreams(name):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    ids = torch.arange(24).view(2, 12)
    inputs = {"input_ids": ids, "attention_mask": mask}
    # Upstream's eager mask has no number that is low enough for fp64: queries that see nothing give NaN.
    _require_upstreams_logits(LlamaForCausalLM, LlamaConfig(**SIZES), name, mask.bool(), exact_name="sdpa", **inputs)


@pytest.mark.parametrize("name", ["patchgen_eager", "patchgen_flex_attention"])
def test_soft_cap_and_windows_are_upstreams(name):
    config = Gemma2Config(**SIZES, sliding_window=5, attn_logit_softcapping=3.0)
    _require_upstreams_logits(Gemma2ForCausalLM, config, name, input_ids=IDS)


def _sinks():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    return GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, rope_parameters=rope)


def test_sinks_may_be_kept_in_any_shape():
    """Upstream's formula reshapes them; so a model may hold one row of them."""
    found = []
    for shape in ((-1,), (1, -1)):
        torch.manual_seed(0)
        model = GptOssForCausalLM._from_config(_sinks(), attn_implementation="patchgen_eager")
        for layer in model.model.layers:
            layer.self_attn.sinks = torch.nn.Parameter(layer.self_attn.sinks.detach().reshape(shape))
        found.append(model(input_ids=IDS).logits)
    assert torch.equal(*found)


def test_sinks_are_upstreams():
    expected = _logits(GptOssForCausalLM, _sinks(), "eager", input_ids=IDS)
    require_equal_up_to_rounding(_logits(GptOssForCausalLM, _sinks(), "patchgen_eager", input_ids=IDS), expected)


def test_what_a_backend_cannot_do_it_refuses_by_name():
    with pytest.raises(ValueError, match=r"'patchgen_sdpa' cannot do sinks, which GptOssAttention needs.*eager"):
        _logits(GptOssForCausalLM, _sinks(), "patchgen_sdpa", input_ids=IDS)
    config = Gemma2Config(**SIZES, attn_logit_softcapping=3.0)
    with pytest.raises(ValueError, match="cannot do soft cap, which Gemma2Attention needs"):
        _logits(Gemma2ForCausalLM, config, "patchgen_sdpa", input_ids=IDS)


def test_a_mask_is_read_as_far_as_there_are_keys():
    """Files that transformers 4 ran draw a column for a token to come."""
    call = attention.attention_function("patchgen_sdpa", BACKENDS["patchgen_sdpa"])
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.full((1, 1, 5, 6), torch.finfo(torch.float32).min).triu(1)
    own, wide = (call(torch.nn.Module(), q, q, q, one)[0] for one in (mask[..., :5].contiguous(), mask))
    assert torch.equal(own, wide)


def test_blocks_of_keys_that_nothing_can_lay_out_are_refused():
    call = attention.attention_function("patchgen_eager", BACKENDS["patchgen_eager"])
    states = torch.zeros(1, 2, 4, 8)
    with pytest.raises(
        attention.UnsupportedError, match="Module passes block_indices to its attention, but no submodule"
    ):
        call(torch.nn.Module(), states, states, states, None, block_indices=torch.zeros(1, 1, 4, 1))


def test_names_are_taken_as_they_are_or_refused_with_the_reason():
    """A flash name is neither looked up as a kernel repository nor replaced by a model's own list."""
    config = Qwen3Config(**SIZES)
    unusable = [name for name, backend in BACKENDS.items() if backend.unavailable() is not None]
    assert unusable or torch.cuda.is_available()
    for name in unusable:
        with pytest.raises(ImportError, match=f"'{name}' cannot run here: it needs"):
            Qwen3ForCausalLM._from_config(config, attn_implementation=name)
    assert GptOssForCausalLM._from_config(
        _sinks(), attn_implementation="patchgen_sdpa"
    ).config._attn_implementation == ("patchgen_sdpa")


def test_masks_that_are_laid_over_a_causal_one_keep_upstreams_builder():
    """Gemma 3 lets image tokens see each other: outside sequence parallelism its own mask is used."""
    from transformers.masking_utils import create_causal_mask

    config = Gemma3Config().text_config
    config._attn_implementation = "patchgen_sdpa"
    embeddings = torch.zeros(1, 6, 4)
    blocks = torch.tensor([[-1, 0, 0, -1, -1, -1]])
    mask = create_causal_mask(config, embeddings, None, None, block_sequence_ids=blocks)
    assert mask.shape == (1, 1, 6, 6)
    assert mask.dense(None)[0, 0, 1, 2]
    call = attention.attention_function("patchgen_flash_varlen", BACKENDS["patchgen_flash_varlen"])
    states = torch.zeros(1, 2, 6, 8)
    told = "'patchgen_flash_varlen' cannot do overlays{}, which Module needs"
    with pytest.raises(attention.UnsupportedError, match=told.format(" and float32")):
        call(torch.nn.Module(), states, states, states, mask)
    states = states.bfloat16()
    with pytest.raises(attention.UnsupportedError, match=told.format("")):
        call(torch.nn.Module(), states, states, states, mask)


@pytest.mark.parametrize("name", IN_FP32)
def test_documents_do_not_see_each_other(name):
    """Changing one token of document 1 changes outputs of document 1 and none of document 2."""
    config = Qwen3Config(**SIZES)
    other = IDS.clone()
    other[0, 3] = 39
    before = _logits(Qwen3ForCausalLM, config, name, input_ids=IDS, **PACKED)
    after = _logits(Qwen3ForCausalLM, config, name, input_ids=other, **PACKED)
    changed = (before != after).any(dim=-1)[0]
    assert changed[3:9].all()
    assert not changed[9:].any()
    assert not changed[:3].any()


@pytest.mark.parametrize("name", IN_FP32)
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_a_mask_of_ones_hides_no_documents(name, dtype):
    """Collators add one; upstream then looks for no documents in the positions, and they would see each other."""
    restarting = torch.cat([torch.arange(7), torch.arange(5)])[None]
    rows = {"input_ids": IDS[:, :12].repeat(2, 1), "position_ids": restarting.repeat(2, 1)}
    mask = torch.ones(2, 12, dtype=dtype)
    alone = {"input_ids": rows["input_ids"][:, 7:], "attention_mask": mask[:, 7:]}
    got = _logits(Qwen3ForCausalLM, Qwen3Config(**SIZES), name, **rows, attention_mask=mask)
    expected = _logits(Qwen3ForCausalLM, Qwen3Config(**SIZES), name, **alone)
    torch.testing.assert_close(got[:, 7:], expected)


def test_documents_beside_padding_are_refused_and_padding_beside_one_document_is_not():
    rows = {
        "input_ids": IDS[:, :12],
        "position_ids": torch.cat([torch.arange(5), torch.arange(4), torch.zeros(3)])[None],
    }
    rows["position_ids"] = rows["position_ids"].long()
    padded = torch.tensor([[1] * 9 + [0] * 3])
    with pytest.raises(ValueError, match="position_ids start again within a row, .* To fix: pass cu_seq_lens_q"):
        _logits(Qwen3ForCausalLM, Qwen3Config(**SIZES), "patchgen_sdpa", **rows, attention_mask=padded)
    left = torch.tensor([[0] * 4 + [1] * 8])  # as generation numbers a row with padding before it
    rows["position_ids"] = (left.cumsum(-1) - 1).masked_fill(left == 0, 1)
    got = _logits(Qwen3ForCausalLM, Qwen3Config(**SIZES), "patchgen_sdpa", **rows, attention_mask=left)
    alone = _logits(Qwen3ForCausalLM, Qwen3Config(**SIZES), "patchgen_sdpa", input_ids=IDS[:, 4:12])
    torch.testing.assert_close(got[:, 4:], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("patchgen_eager", "patchgen_sdpa")])
@pytest.mark.parametrize("feature", [None, "sliding window", "soft cap", "sinks"])
def test_kernels_agree_with_the_formula(name, feature):
    """Outputs and gradients of packed, grouped heads in bf16 against the eager formula in fp32."""
    reason = BACKENDS[name].unavailable()
    if reason is not None or not torch.cuda.is_available():
        pytest.skip(f"{name}: {reason or 'it is compared on a CUDA device'}")
    if feature is not None and feature not in BACKENDS[name].features_on("cuda"):
        pytest.skip(f"{name} refuses {feature}, which another test holds")
    torch.manual_seed(0)
    B, S, N_q, N_k, D = 1, 768, 8, 2, 64
    states = [torch.randn(B, S, heads, D, device="cuda", dtype=torch.bfloat16) for heads in (N_q, N_k, N_k)]
    bounds = torch.tensor([0, 200, 201, 768], dtype=torch.int32, device="cuda")
    sinks = torch.randn(N_q, device="cuda", dtype=torch.bfloat16)
    request = Attention(
        causal=True,
        scaling=D**-0.5,
        window=100 if feature == "sliding window" else None,
        softcap=2.0 if feature == "soft cap" else None,
        documents=Documents(bounds, 567),
    )

    def run(backend, dtype):
        inputs = [t.detach().to(dtype, copy=True).requires_grad_() for t in states]
        own_sinks = sinks.detach().to(dtype, copy=True).requires_grad_() if feature == "sinks" else None
        out = backend.function(*inputs, replace(request, sinks=own_sinks))
        out.float().square().sum().backward()
        return [out, *(t.grad for t in inputs), *([own_sinks.grad] if own_sinks is not None else [])]

    for got, expected in zip(
        run(BACKENDS[name], torch.bfloat16), run(BACKENDS["patchgen_eager"], torch.float32), strict=True
    ):
        error = (got.float() - expected).norm() / expected.norm()
        assert error < 1e-2, f"{name}: {error:.1e}"


# ------------------------------------------------------------------------------- upstream's masks in packed rows

LENGTHS = (5, 7, 4)
BLOCKS = (torch.tensor([-1, 0, 0, 0, -1]), torch.tensor([0, 0, -1, 1, 1, 1, -1]), torch.tensor([0, 0, -1, -1]))
"""Which image each token of a document belongs to."""


def _drawn(way: str, blocks_S: torch.Tensor, positions_S: torch.Tensor):
    """The mask that transformers draws for our eager attention, with one of its ways to lay something over it."""
    from transformers.masking_utils import blockwise_overlay, create_causal_mask, create_chunked_causal_mask

    config = Gemma3Config().text_config
    config._attn_implementation = "patchgen_eager"
    config.attention_chunk_size = 3
    arguments = {
        "config": config,
        "inputs_embeds": torch.zeros(1, len(blocks_S), 8),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions_S[None],
    }
    if way == "chunks":
        return create_chunked_causal_mask(**arguments)
    if way == "or_mask_function":
        return create_causal_mask(**arguments, or_mask_function=blockwise_overlay(blocks_S[None]))
    return create_causal_mask(**arguments, block_sequence_ids=blocks_S[None])


@pytest.mark.parametrize("told", ["positions", "lengths"])
@pytest.mark.parametrize("way", ["or_mask_function", "block_sequence_ids", "chunks"])
def test_masks_of_packed_rows_are_those_of_each_document(way, told):
    """Documents told by position ids, or by lengths alone as on a slice; image numbers repeat in every document."""
    expected = torch.block_diag(
        *(
            _drawn(way, blocks, torch.arange(length)).dense(None)[0, 0].float()
            for length, blocks in zip(LENGTHS, BLOCKS, strict=True)
        )
    ).bool()
    total = sum(LENGTHS)
    restarting = torch.cat([torch.arange(length) for length in LENGTHS])
    mask = _drawn(way, torch.cat(BLOCKS), restarting if told == "positions" else torch.arange(total))
    bounds = torch.tensor([0, 5, 12, 16], dtype=torch.int32)
    told_bounds = mask.bounds(bounds, "Attention")
    assert torch.equal(mask.dense(told_bounds)[0, 0], expected)
    assert mask.dense(told_bounds) is mask.dense(told_bounds)
    if told == "positions":
        assert torch.equal(mask[0, 0] == 0, expected)


def test_a_package_that_lacks_a_package_is_unavailable_with_that_reason(tmp_path, monkeypatch):
    """There is a difference between a package that can be found and one that can be imported."""
    (tmp_path / "kernels_without_base.py").write_text("import the_missing_base\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = attention_backends._needs("kernels_without_base", "kernels")()
    assert "kernels" in reason and "No module named 'the_missing_base'" in reason
