"""Small forms of somebody's config: options are kept, layers are those of each kind, special tokens have ids."""

from __future__ import annotations

import pytest
import transformers
from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, PreTrainedConfig

from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify.inputs import drawable_ids
from patchgen.runtime.verify.shrink import (
    non_default_fields,
    shrink,
    vocabulary,
    why_padding_has_no_row,
    with_dropout,
)
from patchgen.runtime.verify.small_config import SmallConfigError, small_config

# -------------------------------------------------------------------------------------------------------- options


def test_a_small_form_keeps_the_options_of_a_config():
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
    config = CONFIG_MAPPING["qwen3"](
        hidden_size=5120, rope_parameters=rope, attention_bias=True, attention_dropout=0.1, hidden_act="gelu"
    )
    small = shrink(config).config
    assert (small.hidden_size, small.attention_bias, small.hidden_act) == (64, True, "gelu")
    assert small.rope_parameters["rope_type"] == "yarn" and small.attention_dropout == 0.0
    assert with_dropout(small, config).attention_dropout == 0.1


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen3_vl", "mamba2"])
def test_the_small_form_of_defaults_is_that_of_the_class(model_type):
    assert shrink(CONFIG_MAPPING[model_type]()).config.to_dict() == small_config(model_type).config.to_dict()


def test_options_of_a_tower_and_undeclared_ones_are_kept():
    config = CONFIG_MAPPING["llava"](note="mine")
    config.vision_config.hidden_act, config.vision_config.hidden_size = "silu", 4096
    small = shrink(config).config
    assert (small.vision_config.hidden_act, small.note) == ("silu", "mine")
    assert small.vision_config.hidden_size < 4096


def test_what_the_class_derives_from_other_fields_is_no_option():
    """A head size by the full hidden size would not fit the small one."""
    config = CONFIG_MAPPING["cohere2"](num_attention_heads=2)
    assert config.head_dim == config.hidden_size // 2
    options = non_default_fields(config)
    assert options["num_attention_heads"] == 2 and "head_dim" not in options
    small = shrink(config).config
    assert small.head_dim * small.num_attention_heads == small.hidden_size


def test_layers_with_values_of_their_own_are_an_option_if_they_are_not_those_of_the_class():
    default = CONFIG_MAPPING["dots3_note_text"]()
    by_layer = default.to_dict()["per_layer_config"]
    assert by_layer and "per_layer_config" not in non_default_fields(default)
    own = {layer: values | {"kv_lora_rank": 768} for layer, values in by_layer.items()}
    config = CONFIG_MAPPING["dots3_note_text"](per_layer_config=own)
    assert non_default_fields(config)["per_layer_config"] == {int(layer): values for layer, values in own.items()}


@strict
class NoDefaults(PreTrainedConfig):
    """A class that its defaults do not satisfy."""

    model_type = "no_defaults"
    hidden_size: int = 0

    def validate_architecture(self):
        if not self.hidden_size:
            raise ValueError("hidden_size must be given")


def test_all_fields_of_a_class_without_valid_defaults_are_options():
    config = NoDefaults(hidden_size=4096)
    assert non_default_fields(config)["hidden_size"] == 4096
    assert shrink(config).config.hidden_size == sizes.HIDDEN


def test_dropout_comes_back_in_every_part():
    config = CONFIG_MAPPING["llava"]()
    config.vision_config.attention_dropout, config.text_config.attention_dropout = 0.25, 0.5
    small = shrink(config).config
    assert small.vision_config.attention_dropout == small.text_config.attention_dropout == 0.0
    again = with_dropout(small, config)
    assert (again.vision_config.attention_dropout, again.text_config.attention_dropout) == (0.25, 0.5)
    assert small.vision_config.attention_dropout == 0.0  # the small one is not changed


# --------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("config_class", ["Qwen3Config", "GptOssConfig", "LlamaConfig", "Qwen3MoeConfig"])
def test_a_config_of_one_layer_shrinks(config_class: str):
    """Its list of layer kinds has one entry, as many as a list of anything else may have."""
    small = shrink(getattr(transformers, config_class)(num_hidden_layers=1)).config
    assert len(getattr(small, "layer_types", None) or range(small.num_hidden_layers)) == small.num_hidden_layers


@pytest.mark.parametrize("model_type", ["glm", "glm4", "cwm"])
def test_a_list_of_token_ids_as_long_as_the_layers_is_not_one_per_layer(model_type):
    config = CONFIG_MAPPING[model_type](num_hidden_layers=3)
    assert len(config.eos_token_id) == 3
    assert len(set(shrink(config).config.eos_token_id)) == 3


def test_a_list_that_the_class_keeps_as_long_is_not_one_per_layer():
    """Five multipliers of a state-space layer, and five layers."""
    config = CONFIG_MAPPING["falcon_h1"](num_hidden_layers=5)
    assert len(shrink(config).config.ssm_multipliers) == len(config.ssm_multipliers) == 5


@pytest.mark.parametrize("model_type", ["gemma3n_text", "inkling_text", "laguna", "lfm3"])
def test_lists_of_numbers_and_kinds_follow_a_single_layer(model_type):
    config = CONFIG_MAPPING[model_type](num_hidden_layers=1)
    small = shrink(config).config
    assert len(small.layer_types) == small.num_hidden_layers
    assert set(small.layer_types) == set(config.layer_types)


def test_who_asks_for_one_expert_has_one():
    assert shrink(CONFIG_MAPPING["jamba"](num_experts=1)).config.num_experts == 1


def test_a_sparse_layer_alone_stays_sparse():
    assert shrink(CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=1)).config.mlp_only_layers == []
    assert shrink(CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=2)).config.mlp_only_layers == [0]


def test_counts_that_add_up_to_the_layers_become_one_of_each_kind():
    config = CONFIG_MAPPING["gpt_neo"](num_layers=6, attention_types=[[["global"], 2], [["local"], 4]])
    assert shrink(config).config.attention_layers == ["global", "local"]


@pytest.mark.parametrize("model_type", ["dots3_note", "dots3_note_text", "qwen3_moe", "gemma3n_text"])
def test_a_small_config_shrinks_to_itself(model_type):
    small = small_config(model_type).config
    assert shrink(small).config.to_dict() == small.to_dict()


# ----------------------------------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("vocab", [16, 40, 100])
def test_special_tokens_of_a_small_vocabulary_stay_inside_and_leave_others(vocab):
    config = CONFIG_MAPPING["llama"](vocab_size=vocab, pad_token_id=vocab - 1, bos_token_id=vocab - 2, eos_token_id=1)
    small = shrink(config).config
    assert max(small.pad_token_id, small.bos_token_id, small.eos_token_id) < small.vocab_size == vocab
    assert len({small.pad_token_id, small.bos_token_id, small.eos_token_id}) == 3
    assert drawable_ids(small)


def test_a_vocabulary_without_other_tokens_is_told_of():
    with pytest.raises(ValueError, match="a vocabulary of 2 ids with .* leaves a proof none to draw"):
        drawable_ids(CONFIG_MAPPING["llama"](vocab_size=2, bos_token_id=0, eos_token_id=1))
    with pytest.raises(SmallConfigError, match="more than 7 special tokens above 8"):
        shrink(CONFIG_MAPPING["llama"](vocab_size=16, eos_token_id=list(range(8, 16)), bos_token_id=1))


def test_a_padding_token_beyond_the_vocabulary_is_told_of():
    config = CONFIG_MAPPING["llama"](vocab_size=100, pad_token_id=100)
    assert why_padding_has_no_row(config).startswith(
        "pad_token_id = 100 has no row in the embeddings: the vocabulary has 100"
    )
    assert not why_padding_has_no_row(CONFIG_MAPPING["llama"](vocab_size=100, pad_token_id=99))


def test_the_vocabulary_is_that_of_the_text_model():
    config = CONFIG_MAPPING["llava"]()
    config.text_config.vocab_size, config.text_config.pad_token_id = 50, 50
    assert vocabulary(config) == 50 and "pad_token_id = 50 has no row" in why_padding_has_no_row(config)
    config.text_config.pad_token_id = None
    assert why_padding_has_no_row(config) == ""
    assert vocabulary(CONFIG_MAPPING["vit"]()) is None and why_padding_has_no_row(CONFIG_MAPPING["vit"]()) == ""
