"""The masks under our attention names for models that attend by their own code, and what they ask of the backends."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BloomConfig, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from patchgen.runtime import attention, model_calls
from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.attention_calls import FEATURES, FLOAT32, Attention
from patchgen.runtime.attention_masks import MaskStructure
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.verify import training_path
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.small_config import small_config

AVAILABLE = [name for name, backend in BACKENDS.items() if backend.unavailable() is None]
IN_FP32 = [name for name in AVAILABLE if FLOAT32 in BACKENDS[name].features]
LENGTHS = (7, 12, 5)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
IDS = torch.randint(3, 60, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
ROUNDING = 64 * torch.finfo(torch.float32).eps
"""Two orders of the same sums of tens of terms, through a few layers, relative to the largest number."""


@pytest.fixture(scope="module", autouse=True)
def registered():
    attention.register()


class HandWritten(PreTrainedModel):
    """The least that attends by its own code: it never asks for an attention function, nor hands on packing arguments."""

    config_class = LlamaConfig
    _supports_sdpa = _supports_flex_attn = _supports_flash_attn = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **kwargs):
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        make = create_sliding_window_causal_mask if self.config.sliding_window else create_causal_mask
        hidden = self.embed(input_ids)
        mask = make(self.config, hidden, attention_mask, None)
        for _ in range(2):
            q, k, v = self.mix(hidden).chunk(3, dim=-1)
            scores = (q @ k.transpose(1, 2))[:, None] + mask
            hidden = hidden + (scores.softmax(dim=-1) @ v[:, None])[:, 0]
        return CausalLMOutput(logits=self.head(hidden))


def _hand_written(name: str, window: int | None = None) -> HandWritten:
    config = LlamaConfig(vocab_size=64, hidden_size=16, num_attention_heads=2)
    config.sliding_window = window
    torch.manual_seed(0)
    model = HandWritten._from_config(config, attn_implementation=name)
    return model.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear | nn.Embedding) else None).eval()


def _pair(kind: str, head: str, name: str, **overrides):
    """Upstream's class twice with the same weights: with its eager attention, and with one of ours."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = small_config(kind.replace("_", "-") if kind.startswith("xlm_") else kind).config
    for field, value in overrides.items():
        setattr(config, field, value)
    expected = build_model(getattr(module, head), config).eval()
    perturb(expected)
    own = getattr(module, head)._from_config(copy.deepcopy(config), attn_implementation=name).eval()
    own.load_state_dict(expected.state_dict())
    return expected, own


@torch.no_grad()
def _logits(model, **batch):
    return model(**batch, use_cache=False).logits


def _alone(model, ids=IDS):
    return torch.cat([_logits(model, input_ids=part) for part in ids.split(LENGTHS, dim=1)], dim=1)


def _near(got, expected):
    worst = float((got.detach() - expected.detach()).abs().max() / expected.detach().abs().max())
    assert worst < ROUNDING, worst


def _as_told(told: str) -> dict[str, torch.Tensor]:
    if told == "trainer":
        return slice_batch({"input_ids": IDS, "position_ids": POSITIONS}, sp=1, sp_rank=0)
    if told == "lengths":
        bounds = torch.tensor([0, 7, 19, 24], dtype=torch.int32)
        return {"input_ids": IDS, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    return {"input_ids": IDS, "position_ids": POSITIONS}


# ---------------------------------------------------------------------------------------------- hand-written attention


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", IN_FP32)
def test_hand_written_attention_sees_what_it_sees_under_upstreams_name(name, window):
    expected, own = _hand_written("eager", window), _hand_written(name, window)
    _near(_logits(own, input_ids=IDS), _logits(expected, input_ids=IDS))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    padded = {"input_ids": IDS.view(2, 12), "attention_mask": mask}
    _near(_logits(own, **padded)[mask.bool()], _logits(expected, **padded)[mask.bool()])


@pytest.mark.parametrize("told", ["trainer", "lengths", "positions"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", IN_FP32)
def test_hand_written_attention_keeps_documents_apart(name, window, told):
    _near(_logits(_hand_written(name, window), **_as_told(told)), _alone(_hand_written("eager", window)))


TYPES = {
    "bloom": ("bloom", "BloomForCausalLM", {}),
    "xglm": ("xglm", "XGLMForCausalLM", {}),
    "falcon": ("falcon", "FalconForCausalLM", {}),
    "falcon with alibi": ("falcon", "FalconForCausalLM", {"alibi": True}),
    "gptj": ("gptj", "GPTJForCausalLM", {}),
    "gpt_neo": ("gpt_neo", "GPTNeoForCausalLM", {}),
    "mpt": ("mpt", "MptForCausalLM", {}),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32ForCausalLM", {}),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsaForCausalLM", {}),
    "roberta": ("roberta", "RobertaForCausalLM", {}),
}


@pytest.mark.parametrize("name", ["patchgen_eager", "patchgen_sdpa"])
@pytest.mark.parametrize("label", TYPES)
def test_upstreams_models_compute_what_they_compute_under_its_name(label, name):
    """Whole rows as they are and as the trainer hands them, packed rows against each document alone."""
    kind, head, overrides = TYPES[label]
    expected, own = _pair(kind, head, name, **overrides)
    whole = _logits(expected, input_ids=IDS)
    _near(_logits(own, input_ids=IDS), whole)
    _near(_logits(own, **slice_batch({"input_ids": IDS}, sp=1, sp_rank=0)), whole)
    _near(_logits(own, **_as_told("trainer")), _alone(expected))


@pytest.mark.parametrize("label", ["bloom", "xglm", "falcon", "gptj", "deepseek_v32"])
def test_a_later_token_changes_nothing_earlier(label):
    kind, head, overrides = TYPES[label]
    own = _pair(kind, head, "patchgen_sdpa", **overrides)[1]
    other = IDS.clone()
    other[0, 14] = (other[0, 14] + 1) % 60
    before, after = _logits(own, input_ids=IDS), _logits(own, input_ids=other)
    _near(after[:, :14], before[:, :14])  # an expert that gets another number of tokens rounds otherwise
    with pytest.raises(AssertionError):
        _near(after[:, 14:], before[:, 14:])


def test_a_table_of_attention_classes_is_asked_for_the_class_of_the_eager_name():
    """Under a flash name too: the table's own flash class would look for its kernel by upstream's names."""
    from transformers import GPTJForCausalLM
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    assert attention._register_attention_class(GPTJForCausalLM, "patchgen_flash_attention_4") == "patchgen_eager"
    config = small_config("gptj").config
    model = GPTJForCausalLM._from_config(config, attn_implementation="patchgen_sdpa")
    assert {type(layer.attn) for layer in model.transformer.h} == {GPTJAttention}


def test_positions_in_another_count_stay_the_callers():
    """Upstream's own positions, from `padding_idx + 1` on, are what a caller may hand over as well."""
    expected, own = _pair("roberta", "RobertaForCausalLM", "patchgen_sdpa")
    start = expected.config.pad_token_id + 1
    handed = torch.arange(start, start + IDS.shape[1])[None]
    _near(_logits(own, input_ids=IDS, position_ids=handed), _logits(expected, input_ids=IDS))
    reversed_ids = handed.flip(1)
    _near(
        _logits(own, input_ids=IDS, position_ids=reversed_ids, cu_seq_lens_q=torch.tensor([0, 24], dtype=torch.int32)),
        _logits(expected, input_ids=IDS, position_ids=reversed_ids, attention_mask=torch.ones_like(IDS)),
    )


# -------------------------------------------------------------------------------------------------- the mask itself


def _made(name: str, length: int, window: int | None, mask, positions):
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = LlamaConfig()
    config._attn_implementation = name
    config.sliding_window = window
    make = create_sliding_window_causal_mask if window else create_causal_mask
    return make(config, torch.zeros(2, length, 4), mask, None, position_ids=positions)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 5),
    padding=st.none() | st.integers(0, 3),
    name=st.sampled_from(list(BACKENDS)),
)
@settings(max_examples=60)
def test_a_mask_that_is_read_is_upstreams_eager_mask(lengths, window, padding, name):
    length = sum(lengths)
    mask, positions = None, torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    if padding is not None:  # upstream looks for documents only where nothing is padded
        mask, positions = torch.ones(2, length, dtype=torch.long), None
        mask[0, :padding] = 0
        mask[1, length - padding :] = 0
    expected = _made("eager", length, window, mask, positions)
    own = _made(name, length, window, mask, positions)
    assert isinstance(own, MaskStructure)
    assert (own.dtype, own.shape, own.device) == (expected.dtype, expected.shape, expected.device)
    scores = torch.randn(2, 3, length, length)
    assert torch.equal(scores + own, scores + expected)
    assert torch.equal(own + scores, scores + expected)
    assert torch.equal(own[:, 0], expected[:, 0])
    assert torch.equal(own < -1, expected < -1)
    assert torch.equal(own.to(torch.bool), expected.to(torch.bool))
    assert torch.equal(torch.where(own == 0, 1.0, 0.0), torch.where(expected == 0, 1.0, 0.0))
    assert torch.equal(own.dense(own.bounds(None, ""))[:, 0], expected[:, 0] == 0)
    assert own.tensor() is own.tensor()


def test_scores_of_another_dtype_get_the_lowest_number_of_theirs():
    """A tensor that FSDP casts from fp32 to half precision would hold infinities: a padded row would become NaN."""
    mask = _made("patchgen_sdpa", 4, None, torch.tensor([[0, 0, 1, 1]]).repeat(2, 1), None)
    scores = torch.zeros(2, 1, 4, 4, dtype=torch.float16)
    added = scores + mask
    assert added.dtype == torch.float16
    assert added.softmax(-1).isfinite().all()


def test_what_leaves_a_mask_whole_leaves_it_undrawn():
    mask = _made("patchgen_sdpa", 4, None, None, None)
    assert mask[:, :, :, :4] is mask
    assert mask[..., :9] is mask
    assert mask.to(torch.bfloat16) is mask
    assert mask[:, :, :2].shape == (2, 1, 2, 4)
    assert not hasattr(mask, "no_method_of_a_tensor")


def test_a_tower_does_not_get_the_documents_of_the_text():
    """Documents belong to the sequence whose config they came with."""
    text, tower = BloomConfig(), BloomConfig()
    model = nn.Module()
    model.config = text
    bounds = torch.tensor([0, 2, 4], dtype=torch.int32)
    model_calls._RUNNING.calls.append(model_calls.Call(model, bounds))
    try:
        assert model_calls.documents_of(text) is bounds
        assert model_calls.documents_of(tower) is None
    finally:
        model_calls._RUNNING.calls.pop()


def test_a_call_that_fails_leaves_no_note():
    model = _hand_written("patchgen_sdpa")
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[999]]))
    assert not model_calls._RUNNING.calls


def test_layers_that_are_computed_again_attend_as_before():
    """Gradients under activation checkpointing, whose second run has no call of a model around it."""
    from transformers.models.bloom.modeling_bloom import BloomForCausalLM

    config = small_config("bloom").config
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = BloomForCausalLM._from_config(copy.deepcopy(config), attn_implementation="patchgen_sdpa").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**_as_told("trainer"), labels=IDS, use_cache=False).loss.backward()
        found.append({key: parameter.grad for key, parameter in model.named_parameters()})
    for key, gradient in found[0].items():
        assert torch.equal(gradient, found[1][key]), key


# ----------------------------------------------------------------------------------------------- choosing an attention


def test_where_there_is_a_gpu_the_cpu_still_computes_by_what_trains_on_it(monkeypatch):
    """Proofs are made on the CPU of the machine that trains, whatever its GPUs would take."""
    for name, backend in list(BACKENDS.items()):
        monkeypatch.setitem(BACKENDS, name, replace(backend, unavailable=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert attention.choose() == attention.ORDER[0] == "patchgen_flash_attention_4"
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    for asked in ([], *([feature] for feature in FEATURES)):
        chosen = attention.choose(asked, device_type="cpu")
        assert chosen in training_path.CPU_ATTENTION
    request = Attention(causal=True, scaling=1.0)
    for name in training_path.CPU_ATTENTION:
        (gradient,) = torch.autograd.grad(BACKENDS[name].function(q, q, q, request).sum(), q)
        assert gradient.isfinite().all(), name


def test_the_fastest_attention_with_all_features_is_chosen():
    assert set(attention.ORDER) == set(BACKENDS)
    for device_type in ("cpu", "cuda"):
        for asked in ([], *([feature] for feature in FEATURES)):
            chosen = attention.choose(asked, device_type=device_type)
            assert not attention.missing_features(chosen, asked, device_type=device_type)
            faster = [name for name in attention.ORDER[: attention.ORDER.index(chosen)] if name in AVAILABLE]
            if device_type == "cpu":
                faster = [name for name in faster if BACKENDS[name].has_cpu_backward]
            assert all(attention.missing_features(name, asked, device_type=device_type) for name in faster)
    assert attention.missing_features("patchgen_flex_attention", ["sinks"], device_type="cpu") == ("sinks",)
    assert attention.missing_features("patchgen_flex_attention", ["sinks"], device_type="cuda") == ()
    assert attention.choose(FEATURES) == "patchgen_eager"
    with pytest.raises(ValueError, match="nknown attention feature.*sinkz"):
        attention.choose(["sinkz"])


def test_a_recording_tells_what_a_model_asks_for_and_computes_it():
    expected, own = _pair("gemma2", "Gemma2ForCausalLM", "patchgen_sdpa")
    with pytest.raises(attention.UnsupportedError, match="cannot do soft cap"):
        _logits(own, input_ids=IDS)
    with attention.recording() as asked:
        _near(_logits(own, input_ids=IDS), _logits(expected, input_ids=IDS))
    kinds = {tuple(sorted(features)) for calls in asked.values() for features in calls}
    assert kinds == {("sliding window", "soft cap"), ("soft cap",)}, "each layer by itself"
    assert {attention.choose(features, device_type="cpu") for features in kinds} == {"patchgen_eager"}
    with pytest.raises(attention.UnsupportedError):
        _logits(own, input_ids=IDS)


# --------------------------------------------------------------------------- what models lay over their mask themselves


@pytest.mark.parametrize("name", IN_FP32)
def test_selected_keys_and_biases_mean_the_same_under_every_name(name):
    """`indices` are keys that a query sees, -1 none; `position_bias` is added to the scores. Outputs and gradients."""
    torch.manual_seed(0)
    trains = BACKENDS[name].has_cpu_backward
    q, k, v = (torch.randn(1, 2, 24, 8, requires_grad=trains) for _ in range(3))
    bias = torch.randn(1, 2, 24, 24, requires_grad=trains)
    indices = torch.stack([torch.arange(24), torch.arange(24) // 2, torch.full((24,), -1)], dim=-1)[None]
    bounds = torch.tensor([0, 7, 19, 24], dtype=torch.int32)
    call = attention.attention_function(name, BACKENDS[name])
    out = call(nn.Module(), q, k, v, None, position_bias=bias, indices=indices, cu_seq_lens_q=bounds)[0]
    seen = torch.zeros(24, 24, dtype=torch.bool)
    seen[torch.arange(24)[:, None], indices[0, :, :2]] = True
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    seen &= document[:, None] == document[None]
    scores = (q @ k.transpose(2, 3) * 8**-0.5 + bias).masked_fill(~seen, -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    _near(out, expected)
    if not trains:
        return
    grads = [torch.autograd.grad(x.square().sum(), [q, k, v, bias], retain_graph=True) for x in (out, expected)]
    for got, wanted in zip(*grads, strict=True):
        _near(got, wanted)


def test_a_mask_says_what_is_causal_whatever_a_module_says():
    """Gemma in PaliGemma calls itself bidirectional and draws a causal mask for text: upstream's formula reads the mask."""
    module = nn.Module()
    module.is_causal = False
    states = [torch.randn(2, 2, 6, 8) for _ in range(3)]
    out = {
        name: attention.attention_function(name, BACKENDS[name])(module, *states, _made(name, 6, None, None, None))[0]
        for name in IN_FP32
    }
    scores = states[0] @ states[1].transpose(2, 3) * 8**-0.5 + _made("eager", 6, None, None, None)
    for got in out.values():
        _near(got, (scores.softmax(-1) @ states[2]).transpose(1, 2))


def test_sinks_of_each_token():
    """A logit per query, as the last column of the scores."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    sinks = torch.randn(1, 2, 6, 1)
    call = attention.attention_function("patchgen_eager", BACKENDS["patchgen_eager"])
    out = call(nn.Module(), q, k, v, _made("patchgen_eager", 6, None, None, None), sinks=sinks)[0]
    scores = q @ k.transpose(2, 3) * 8**-0.5 + _made("eager", 6, None, None, None)[:1]
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    _near(out, (weights @ v).transpose(1, 2))
    assert attention.choose(["sinks", "sinks of each token"], device_type="cuda") == "patchgen_eager"
