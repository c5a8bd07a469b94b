"""The config of an export: the source's own file where the run changed nothing, and what readers of either form of rope read."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import peft
import pytest
import small_models
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from patchgen.runtime import registry
from patchgen.runtime.checkpoint import (
    Checkpointer,
    convert,
    export_pretrained,
    export_run,
    load_pretrained,
    merge_adapter,
)
from patchgen.runtime.checkpoint.model_files import config_files, on_meta
from patchgen.runtime.checkpoint.written_config import changed_fields, config_text
from patchgen.runtime.verify.small_config import small_config

SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}
OLD = {
    "architectures": ["LlamaForCausalLM"], "auto_map": {"AutoConfig": "mine.MyConfig"}, "model_type": "llama",
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    "rope_theta": 500000.0, "rope_scaling": SCALING, "torch_dtype": "bfloat16", "transformers_version": "4.46.3",
    "pretraining_tp": 1, "use_cache": True, "a_field_of_mine": {"note": "für Menschen"}, "attention_bias": False,
}  # fmt: skip


def old_source(folder: Path, fields: dict = OLD, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A checkpoint with a config as transformers 4 wrote it, with an indentation of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=4, ensure_ascii=False), encoding="utf-8")
    config = AutoConfig.from_pretrained(folder)
    small_models.build(LlamaForCausalLM, config).to(dtype).save_pretrained(folder / "weights")
    (folder / "weights" / "model.safetensors").rename(folder / "model.safetensors")
    return folder


def loaded_from(source: Path, cls: type = LlamaForCausalLM, **overrides):
    """The model of a recipe: the source's config with overrides, and its weights in fp32."""
    config = AutoConfig.from_pretrained(source)
    for name, value in overrides.items():
        setattr(config, name, value)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    missing = ["score.*"] if cls is LlamaForSequenceClassification else []
    load_pretrained(model, source, allow_missing=missing, allow_unexpected=["lm_head.*"])
    return model


def by_old_readers(fields: dict) -> tuple[float, dict | None]:
    """What transformers 4 reads of rope."""
    return fields.get("rope_theta", 10000.0), fields.get("rope_scaling")


def by_new_readers(folder: Path) -> dict:
    return AutoConfig.from_pretrained(folder).rope_parameters


@pytest.fixture
def source(tmp_path) -> Path:
    return old_source(tmp_path / "source")


@pytest.mark.parametrize(
    "way", ["model", "its folder named", "part only", "run", "run whose source is gone", "convert", "merge"]
)
def test_what_the_run_did_not_change_is_the_file_itself(way, source, tmp_path):
    """Byte for byte: with the old form of rope, the old name of dtype, fields that transformers does not know, and the spaces."""
    text, out = (source / "config.json").read_bytes(), tmp_path / "out"
    if way == "convert":
        convert(source, out)
    elif way == "merge":
        adapted = peft.get_peft_model(loaded_from(source), peft.LoraConfig(r=2, target_modules=["q_proj"]))
        adapted.save_pretrained(tmp_path / "adapter")
        merge_adapter(tmp_path / "adapter", source, out)
    elif way.startswith("run"):
        Checkpointer(tmp_path / "run").save(1, model=loaded_from(source), asynchronous=False)
        if "gone" in way:
            source.rename(tmp_path / "elsewhere")
        export_run(tmp_path / "run", out)
    else:
        model = loaded_from(source)
        export_pretrained(
            model, out, source=source if way == "its folder named" else None, trained_only=way == "part only"
        )
    assert (out / "config.json").read_bytes() == text


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 500000.0, "factor": 4.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0},
        {"rope_type": "default", "rope_theta": 70000.0},
    ],
    ids=["theta", "factor", "type", "none"],
)
def test_changed_rope_is_the_same_to_readers_of_both_forms(changed, source, tmp_path):
    rope = changed if "rope_type" in changed else SCALING | {"rope_theta": 500000.0} | changed
    export_pretrained(loaded_from(source, rope_parameters=rope), tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    theta, scaling = by_old_readers(fields)
    expected = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert theta == rope["rope_theta"] and (scaling or {"rope_type": "default"}) == expected
    assert by_new_readers(tmp_path / "out") == rope == fields["rope_parameters"]
    kept = OLD.keys() - {"rope_theta", "rope_scaling"}
    assert {key: fields[key] for key in kept} == {key: OLD[key] for key in kept}


def test_other_changed_fields_leave_rope_and_the_rest_alone(source, tmp_path):
    export_pretrained(loaded_from(source, rms_norm_eps=1e-3), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == OLD | {"rms_norm_eps": 1e-3}


def test_another_head_is_named_and_the_rest_stays(source, tmp_path):
    export_pretrained(loaded_from(source, LlamaForSequenceClassification, num_labels=3), tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForSequenceClassification"]
    assert len(fields["id2label"]) == 3 and by_old_readers(fields) == by_old_readers(OLD)
    assert type(LlamaForSequenceClassification.from_pretrained(tmp_path / "out").config) is LlamaConfig


def test_a_model_without_a_source_has_both_forms(tmp_path):
    rope = SCALING | {"rope_theta": 500000.0}
    config = LlamaConfig(
        **{key: OLD[key] for key in OLD if key not in ("rope_theta", "rope_scaling")}, rope_parameters=rope
    )
    export_pretrained(small_models.build(LlamaForCausalLM, config), tmp_path / "out")
    assert by_old_readers(json.loads((tmp_path / "out" / "config.json").read_text())) == (500000.0, SCALING)
    assert by_new_readers(tmp_path / "out") == rope


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("how", ["export", "convert"])
def test_the_config_says_what_the_files_hold_under_the_name_that_the_source_uses(how, name, tmp_path):
    fields = {key: value for key, value in OLD.items() if key != "torch_dtype"} | {name: "bfloat16"}
    source = old_source(tmp_path / "source", fields)
    if how == "export":
        export_pretrained(loaded_from(source), tmp_path / "out", dtype=torch.float16)
    else:
        convert(source, tmp_path / "out", dtype=torch.float16)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == fields | {name: "float16"}


TYPES = sorted({kind for model in registry.generated_models() for kind in model.model_types})


def changed_rope(config) -> int:
    """Changes theta in every part of a config; returns the number of changed parts."""
    count = 0
    for part in [config, *(getattr(config, name, None) for name in config.sub_configs)]:
        rope = getattr(part, "rope_parameters", None)
        for values in [rope, *(rope.values() if isinstance(rope, dict) else ())]:
            if isinstance(values, dict) and "rope_theta" in values:
                values["rope_theta"] = 4321.0
                count += 1
    return count


@pytest.mark.parametrize("kind", TYPES)
def test_all_types_read_back_what_is_written(kind):
    """For every type with a generated model: an unchanged config is the text itself; a changed one, and one without a source,
    is what transformers reads back, and readers of the old form find the theta that they look for."""
    try:
        config = small_config(kind).config
        cls = registry.find_head(config)
    except registry.UnknownModelError:
        pytest.skip("a part of a larger config, which has its own row")
    model = on_meta(lambda: cls._from_config(copy.deepcopy(config), attn_implementation="eager"))
    source = config_files(model)["config.json"]
    assert config_text(model, source, torch.float32) == source
    read = type(config).from_dict
    for text in (config_text(model, None, torch.float32), source):
        assert (
            read(config._decode_special_floats(json.loads(text))).to_dict()
            == read(config._decode_special_floats(json.loads(source))).to_dict()
        )
    if changed_rope(model.config):
        text = config_text(model, source, torch.float32)
        fields = config._decode_special_floats(json.loads(text))
        back = read(copy.deepcopy(fields))
        assert not changed_fields(back.to_dict(), model.config.to_dict())
        flat = isinstance(fields.get("rope_parameters"), dict) and "rope_theta" in fields["rope_parameters"]
        assert not flat or fields["rope_theta"] == fields["rope_parameters"]["rope_theta"] == 4321.0


FLAT = {
    "model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "auto_map": {"AutoConfig": "mine.MyConfig"},
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "eos_token_id": 2, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [("qwen2_vl", "Qwen2VLForConditionalGeneration"), ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")],
)
@pytest.mark.parametrize("change", [{"vocab_size": 320}, {"eos_token_id": 5}, {"rope_theta": 20000.0}], ids=str)
def test_a_change_of_a_flat_config_goes_where_its_fields_are(kind, name, change):
    """Configs of transformers 4 have the language model's fields beside `vision_config`: all others stay as they are."""
    import transformers

    fields = FLAT | {"model_type": kind, "architectures": [name]}
    source = json.dumps(fields, indent=4)
    config = transformers.AutoConfig.for_model(kind).from_dict(json.loads(source))
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config, dtype=torch.bfloat16)
    assert config_text(model, source, torch.bfloat16) == source
    for key, value in change.items():
        if key == "rope_theta":
            model.config.text_config.rope_parameters["rope_theta"] = value
        else:
            setattr(model.config.text_config, key, value)
    written = json.loads(config_text(model, source, torch.bfloat16))
    assert {key: written[key] for key in change} == change
    assert {key: written.get(key) for key in fields if key not in (*change, "rope_scaling")} == {
        key: value for key, value in fields.items() if key not in (*change, "rope_scaling")
    }
    assert written["rope_scaling"]["mrope_section"] == [1, 1, 2] and written["rope_scaling"]["type"]
    assert type(config).from_dict(written).to_dict()["text_config"] == model.config.to_dict()["text_config"]
