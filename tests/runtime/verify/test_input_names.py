"""Inputs without a rule of packing are found where processors make them, and none is left for a type that is proven."""

from __future__ import annotations

import json

import pytest
import transformers

from patchgen.commands import sweeping
from patchgen.runtime.parallel import batch_fields
from patchgen.runtime.verify import input_names, records

HEADS = {
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", "batch_num_images"),
    "video_llava": ("VideoLlavaForConditionalGeneration", "pixel_values_images"),
    "video_llama_3": ("VideoLlama3ForConditionalGeneration", "image_merge_sizes"),
}


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    """Rules of models that other tests have loaded do not count."""
    monkeypatch.setattr(batch_fields, "_INFERRED", set())
    for name in batch_fields.RULES.keys() - batch_fields._TABLE:
        monkeypatch.delitem(batch_fields.RULES, name)
    yield
    for name in batch_fields._INFERRED:
        batch_fields.RULES.pop(name, None)


@pytest.mark.parametrize("kind", HEADS)
def test_what_features_are_computed_from_is_packed_as_items(kind):
    """Of the head's own method, or of the model's inside it; whatever the processor needs that is not installed."""
    name, field = HEADS[kind]
    head = getattr(transformers, name)
    assert field in input_names.inputs_without_rule(head, kind, {field})
    batch_fields.infer_item_fields(head)
    assert field not in input_names.inputs_without_rule(head, kind, {field})
    assert batch_fields.rule_of(field) == batch_fields.ITEMS
    assert "vision_feature_layer" not in batch_fields.RULES, "a number, and no tensor of items"


def test_what_a_recipe_says_of_an_input_comes_before_what_was_read_from_the_model():
    batch_fields.infer_item_fields(transformers.LlavaOnevisionForConditionalGeneration)
    batch_fields.declare({"batch_num_images": {"pack_dim": -1}}, "inputs")
    assert batch_fields.rule_of("batch_num_images") == batch_fields.FieldRule(-1)
    batch_fields.infer_item_fields(transformers.LlavaOnevisionForConditionalGeneration)
    assert batch_fields.rule_of("batch_num_images") == batch_fields.FieldRule(-1)
    with pytest.raises(ValueError, match="has the rule"):
        batch_fields.declare({"batch_num_images": {"pack_dim": 0}}, "inputs")


def test_processors_are_read_without_their_packages():
    assert {
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "mm_token_type_ids",
    } <= input_names.processor_outputs("qwen2_vl")
    assert {"aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"} <= input_names.processor_outputs("mllama")
    assert {"spatial_shapes", "pixel_attention_mask"} <= input_names.processor_outputs("lfm2_vl"), "needs torchvision"
    assert input_names.processor_outputs("llama") == frozenset()


def test_what_is_used_up_on_the_way_needs_no_rule():
    assert "num_soft_tokens_per_image" in input_names.processor_outputs("gemma4")
    assert input_names.inputs_without_rule(transformers.Gemma4ForConditionalGeneration, "gemma4", ()) == []


def test_a_proven_type_with_an_input_without_a_rule_is_an_error_of_the_record(tmp_path, capsys):
    row = {
        "model_type": "odd",
        "family": "vision",
        "status": "proven",
        "moe": False,
        "inputs_without_rule": ["heights"],
    }
    assert sweeping._print_summary([row], tmp_path / "coverage.json", names_given=True) == 1
    told = capsys.readouterr().out
    assert "error: odd is proven, but no packing rule covers heights" in told
    assert sweeping._print_summary([row | {"inputs_without_rule": []}], tmp_path / "c.json", names_given=True) == 0


def test_the_page_of_the_record_counts_them():
    path = records.path_in(None)
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = [{**row, "inputs_without_rule": []} for row in record["rows"]]
    assert "say how to pack" not in records.page(record["key"], rows)
    assert "**none for a proven type**." in records.page(record["key"], rows)
    bad = next(row for row in rows if row["family"] != "text" and row["status"] == "proven")
    bad["inputs_without_rule"] = ["heights"]
    assert f"**{bad['model_type']}: heights for a proven type**" in records.page(record["key"], rows)


def test_no_proven_type_of_the_record_has_one():
    rows = records.read(records.path_in(None)).values()
    found = {row["model_type"]: row["inputs_without_rule"] for row in rows if row["status"] == "proven"}
    assert len(found) > 100 and not {kind: without for kind, without in found.items() if without}
