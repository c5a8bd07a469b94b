"""Values that a user gives the small config of a model: kept in a file beside it, and obeyed by every small form."""

from __future__ import annotations

import json

import pytest
from transformers import CONFIG_MAPPING

from patchgen.runtime.registry import find_model
from patchgen.runtime.verify import given_config, verify_model
from patchgen.runtime.verify.shrink import shrink
from patchgen.runtime.verify.small_config import SmallConfigError, small_config


def test_no_file_changes_nothing(tmp_path):
    given = given_config.read(tmp_path)
    assert given.small_config("qwen3_moe").config.to_dict() == small_config("qwen3_moe").config.to_dict()
    config = CONFIG_MAPPING["qwen3_moe"](num_experts=16)
    assert given.shrink(config).config.to_dict() == shrink(config).config.to_dict()


def test_set_values_stay_as_they_are(tmp_path):
    given = given_config.GivenConfig(exact={"hidden_size": 96})
    assert given.small_config(CONFIG_MAPPING["qwen3_moe"]).config.hidden_size == 96
    given_config.write(tmp_path, None, ["text_config.num_attention_heads=6"])
    given = given_config.read(tmp_path)
    for variant in ("base", "router_logits"):
        small = given.small_config(CONFIG_MAPPING["qwen3_vl_moe"], variant=variant).config
        assert small.text_config.num_attention_heads == 6
    assert given.shrink(CONFIG_MAPPING["qwen3_vl_moe"]()).config.text_config.num_attention_heads == 6


def test_the_options_of_a_run_are_its_own():
    """Sizes follow them; a norm of weights, a window or an activation that only the small config has would prove another model."""
    given = given_config.GivenConfig(
        exact={"norm_topk_prob": True, "hidden_act": "gelu", "sliding_window": 8, "hidden_size": 96}
    )
    run = CONFIG_MAPPING["qwen3_moe"](norm_topk_prob=False, sliding_window=None)
    small = given.shrink(run).config
    assert (small.norm_topk_prob, small.hidden_act, small.sliding_window, small.hidden_size) == (
        False,
        "silu",
        None,
        96,
    )
    given = given_config.GivenConfig(exact={"text_config": {"hidden_act": "gelu", "num_attention_heads": 6}})
    run = CONFIG_MAPPING["qwen3_vl_moe"]()
    small = given.shrink(run).config.text_config
    assert (small.hidden_act, small.num_attention_heads) == ("silu", 6)


def test_a_config_is_made_small_with_its_options(tmp_path):
    file = tmp_path / "config.json"
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    config = CONFIG_MAPPING["qwen3_moe"](rope_parameters=yarn, norm_topk_prob=True)
    file.write_text(json.dumps(config.to_dict()))
    given_config.write(tmp_path, file, ["num_experts=6"])
    given = given_config.read(tmp_path)
    small = given.small_config(type(config)).config
    assert small.rope_parameters["rope_type"] == "yarn" and small.norm_topk_prob is True
    assert (small.num_experts, small.hidden_size) == (6, small_config("qwen3_moe").config.hidden_size)
    assert given.small_config(type(config), variant="router_logits").config.output_router_logits is True


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["hidden_size"], "expected field=value"),
        (["=3"], "expected field=value"),
        (["hid(=3"], "expected field=value"),
        (["a..b=3"], "expected field=value"),
        (["hidden_size=[1"], "the value is no YAML"),
        (["head_dim=3", "head_dim.a=4"], "head_dim has the value 3, and no fields"),
    ],
)
def test_a_setting_of_another_form_is_refused(settings, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        given_config.write(tmp_path, None, settings)
    assert not (tmp_path / given_config.FILE_NAME).exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("hiden_size=96", "there is no field hiden_size; near it: hidden_size"),
        ("text_confg.hidden_size=96", "there is no field text_confg"),
        ("text_config.hiden_size=96", "there is no field hiden_size"),
        ("text_config=5", "text_config is a config of its own"),
        ("head_dim=8", "head_dim is a field of text_config: set text_config.head_dim"),
    ],
)
def test_a_value_without_effect_is_refused(setting, words, tmp_path):
    given_config.write(tmp_path, None, [setting])
    name = "qwen3_vl_moe" if "text" in setting + words else "qwen3_moe"
    with pytest.raises(SmallConfigError, match=words):
        given_config.read(tmp_path).small_config(CONFIG_MAPPING[name])


def test_the_config_of_another_model_is_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG_MAPPING["llama"]().to_dict()))
    given_config.write(tmp_path, file, [])
    with pytest.raises(SmallConfigError, match="is of model_type 'llama', not 'qwen3_moe'"):
        given_config.read(tmp_path).small_config(CONFIG_MAPPING["qwen3_moe"])


def test_later_values_join_earlier_ones(tmp_path):
    given_config.write(tmp_path, None, ["hidden_size=96"])
    given_config.write(tmp_path, None, ["num_experts=6"])
    assert given_config.read(tmp_path).exact == {"hidden_size": 96, "num_experts": 6}


@pytest.mark.parametrize("text", ['{"set": 3}', '{"config": [], "set": {}}', "{not json", "[1]", '{"sets": {}}'])
def test_a_file_of_another_form_is_told_with_its_name(text, tmp_path):
    (tmp_path / given_config.FILE_NAME).write_text(text)
    with pytest.raises(ValueError, match=rf"{given_config.FILE_NAME}: expected .* To fix: delete it"):
        given_config.read(tmp_path)


def test_a_config_class_that_fills_in_a_dictionary_changes_no_given_value():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    given = given_config.GivenConfig(exact={"rope_parameters": dict(yarn)})
    for _ in range(2):
        assert given.small_config(CONFIG_MAPPING["qwen3"]).config.rope_parameters["rope_type"] == "yarn"
        assert given.exact == {"rope_parameters": yarn}


def test_no_variant_that_given_values_leave_as_it_is(tmp_path):
    given = given_config.GivenConfig(exact={"output_router_logits": False, "tie_word_embeddings": False})
    head = find_model("qwen3_moe").upstream().Qwen3MoeForCausalLM
    names = {"router_logits", "tied", "untied"}
    assert names & set(verify_model._variants(head, given_config.GivenConfig())) and not names & set(
        verify_model._variants(head, given)
    )
