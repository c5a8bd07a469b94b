"""Small configs: they are small, keep every kind of layer, and upstream's own class trains on them."""

from __future__ import annotations

import pytest
import torch
import transformers
from huggingface_hub.dataclasses import strict
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify.comparison import train_step
from patchgen.runtime.verify.inputs import special_ids, text_cases
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.small_config import UPSTREAM_REFUSALS, SmallConfigError, applicable_variants, small_config
from patchgen.runtime.verify.small_values import split

# one type per way of saying what a model is
TYPES = (
    "llama", "gpt2", "falcon", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3_text", "gpt_oss", "mamba2", "jamba",
    "nemotron_h", "bart", "dots3_note_text",
)  # fmt: skip


def trained(model_type: str) -> torch.nn.Module:
    """Upstream's causal head, small, after a step on every text case: losses and logits finite, some gradient in each."""
    head = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    small = small_config(head.config_class)
    model, cases = build_model(head, small.config), text_cases(small.config, head)
    assert cases
    for case in cases:
        step = train_step(model, case)
        assert all(step.outputs[name].isfinite().all() for name in ("loss", "logits")), case.name
        assert len(step.parameters_without_gradient()) < len(step.gradients), case.name
    return model


@pytest.mark.parametrize("model_type", TYPES)
def test_upstreams_own_class_trains_on_it(model_type):
    trained(model_type)
    assert small_config(model_type).unclassified == ()


@pytest.mark.parametrize("model_type", TYPES)
def test_it_is_small(model_type):
    head = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    model = build_model(head, small_config(head.config_class).config)
    assert sum(parameter.numel() for parameter in model.parameters()) < 600_000


@pytest.mark.slow
def test_it_covers_the_text_types_of_transformers():
    refused, with_experts = {}, 0
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            names = {type(module).__name__ for module in trained(model_type).modules()}
        except UPSTREAM_REFUSALS as refusal:
            refused[model_type] = refusal
        else:
            with_experts += any("Experts" in name or "SparseMoe" in name for name in names)
    assert len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - len(refused) >= 150, refused
    assert with_experts >= 45


def test_every_kind_of_layer_is_there():
    qwen3_next = small_config("qwen3_next").config
    assert set(qwen3_next.layer_types) == {"linear_attention", "full_attention"}
    assert qwen3_next.mlp_only_layers == [0]
    deepseek_v4 = small_config("deepseek_v4").config
    assert set(deepseek_v4.layer_types) == {"compressed_sparse_attention", "heavily_compressed_attention"}
    assert set(deepseek_v4.mlp_layer_types) == {"hash_moe", "moe"}
    assert max(deepseek_v4.compress_rates.values()) < sizes.SEQUENCE  # else nothing would be compressed
    lfm2_moe = small_config("lfm2_moe").config  # its class leaves the kinds to the checkpoint
    assert set(lfm2_moe.layer_types) == {"conv", "full_attention"}
    granite = small_config("granitemoehybrid").config  # all alike by default
    assert set(granite.layer_types) == {"linear_attention", "full_attention"}


def test_relations_of_the_defaults_hold_again():
    assert (mla := small_config("deepseek_v3").config).num_key_value_heads == mla.num_attention_heads
    assert (gqa := small_config("llama").config).num_key_value_heads < gqa.num_attention_heads
    mamba2 = small_config("mamba2").config
    assert mamba2.expand * mamba2.hidden_size == mamba2.num_heads * mamba2.head_dim
    grouped = small_config("deepseek_v3").config
    assert grouped.n_routed_experts % grouped.n_group == 0
    assert grouped.num_experts_per_tok <= grouped.n_routed_experts // grouped.n_group * grouped.topk_group


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma3", "qwen3_omni_moe", "glm4"])
def test_special_ids_lie_in_the_small_vocabulary(model_type):
    config = small_config(model_type).config
    ids = special_ids(config)
    assert all(token < sizes.VOCAB for token in ids)


def test_variants_set_what_the_config_knows():
    assert applicable_variants(small_config("qwen3_moe").config) == ("base", "router_logits", "tied", "window")
    assert applicable_variants(small_config("mistral").config) == ("base", "tied", "no_window")
    assert small_config("qwen3_moe", variant="router_logits").config.output_router_logits is True
    assert small_config("qwen3_moe", variant="window").config.sliding_window == sizes.WINDOW
    assert small_config("qwen3_moe").config.sliding_window is None
    assert set(small_config("qwen3", variant="window").config.layer_types) == {"full_attention", "sliding_attention"}
    assert "experts" in applicable_variants(small_config("gemma4_text").config)
    assert small_config("gemma4_text", variant="experts").config.num_experts == sizes.EXPERTS
    assert small_config("gemma2", variant="untied").config.tie_word_embeddings is False
    assert small_config(
        "qwen3_omni_moe", variant="router_logits"
    ).config.thinker_config.text_config.output_router_logits


def test_it_does_not_change_the_class_it_reads():
    from transformers import Qwen3MoeConfig

    before = Qwen3MoeConfig().to_dict()
    small_config(Qwen3MoeConfig)
    assert Qwen3MoeConfig().to_dict() == before


@strict
class Refusing(PreTrainedConfig):
    """A config that no small hidden size satisfies."""

    model_type = "refusing"
    hidden_size: int = 4096

    def validate_architecture(self):
        if self.hidden_size != 4096:
            raise ValueError("hidden_size must be 4096")


def test_a_refusal_names_upstreams_reason_and_what_was_tried():
    with pytest.raises(SmallConfigError, match=r"hidden_size must be 4096(.|\n)*'hidden_size': 64") as caught:
        small_config(Refusing)
    assert "hidden_size must be 4096" in caught.value.reason


# -------------------------------------------------------------------------------------------------- properties


@given(st.integers(1, 64), st.lists(st.integers(1, 64), min_size=1, max_size=4))
def test_split_parts_add_up(total, shares):
    assert sum(split(total, shares)) == total


@given(
    st.sampled_from(["num_experts", "hidden_size", "head_dim", "kv_lora_rank", "sliding_window"]),
    st.integers(1, 10**6),
)
def test_no_rule_enlarges(name, declared):
    assert sizes.rule_for(name).small(declared) <= declared


def test_what_a_composite_config_says_of_its_tower_fits_the_small_tower():
    tower = small_config("mistral3").config.vision_config  # is given a head size that its own class does not declare
    assert tower.head_dim == tower.hidden_size // tower.num_attention_heads
    layers = small_config("vipllava").config
    count = layers.vision_config.num_hidden_layers
    assert all(-count <= layer <= count for layer in layers.vision_feature_layer)
    queries = small_config("aria").config
    patches = (queries.vision_config.image_size // queries.vision_config.patch_size) ** 2
    assert patches in queries.projector_patch_to_query_dict
    assert small_config("minicpmv4_6").config.image_token_id < sizes.VOCAB  # None by default


def test_a_class_with_one_expert_by_default_routes_in_its_small_form():
    """Two ranks share them."""
    assert small_config("hunyuan_v1_moe").config.num_experts == sizes.EXPERTS
