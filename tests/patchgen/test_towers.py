"""Which towers are divided over ranks, read off upstream's own files; and what is said of the others."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
from generation_cases import applied

from patchgen import pipeline, source, upstream
from patchgen.anatomy import Role, study
from patchgen.anatomy import towers as towers_module
from patchgen.anatomy.towers import chunked_convolution, layer_loop
from patchgen.errors import LeftAlone
from patchgen.passes.fill_back import FillBack, language_parts, towers_held_whole


def anatomy_of(model: str):
    found = upstream.load(model)
    return study(source.parse(found.text, found.path), found)


def towers(model: str, role: str):
    anatomy = anatomy_of(model)
    return anatomy, anatomy.with_role(role)[0]


@pytest.mark.parametrize(
    ("model", "group", "gathered"),
    [
        ("qwen3_vl", "self.spatial_merge_unit", ("deepstack_feature_lists", "merged_hidden_states")),
        ("qwen2_vl", "self.spatial_merge_size**2", ("merged_hidden_states",)),
        ("glm4v_moe", "self.spatial_merge_size**2", ("merged_hidden_states",)),
    ],
)
def test_what_is_gathered_below_the_layers(model, group, gathered):
    loop = layer_loop(*towers(model, Role.VISION))
    assert loop.rows == ("hidden_states", "position_embeddings")
    assert loop.group == group
    assert [names for _, names in loop.gathers] == [gathered]


def test_windows_are_put_back_into_order_on_all_rows():
    anatomy, tower = towers("qwen2_5_vl", Role.VISION)
    loop = layer_loop(anatomy, tower)
    assert loop.bounds == ("cu_seqlens", "cu_window_seqlens")
    ((place, names),) = loop.gathers
    assert names == ("merged_hidden_states",)
    assert "reverse_indices" in source.ast.unparse(tower.methods["forward"].body[place])


@pytest.mark.parametrize(("model", "chunks"), [("qwen3_omni_moe", 1), ("qwen2_5_omni", 2)])
def test_chunks_of_sound_are_divided_up_to_the_selection_of_what_is_no_padding(model, chunks):
    anatomy, tower = towers(model, Role.AUDIO)
    found = chunked_convolution(anatomy, tower, tower.methods["forward"])
    assert len(found.chunks) == chunks
    assert found.result == "padded_embed"


@pytest.mark.parametrize(
    ("model", "role", "why"),
    [
        ("voxtral", Role.AUDIO, "VoxtralAttention does not choose between lengths and one call per input"),
        ("got_ocr2", Role.VISION, "self.layers holds no attention of this file"),
    ],
)
def test_other_towers_say_why_they_are_computed_whole(model, role, why):
    with pytest.raises(LeftAlone, match=why):
        layer_loop(*towers(model, role))


@pytest.mark.parametrize(
    ("model", "held"),
    [("llava", ["vision_tower"]), ("voxtral", ["audio_tower"]), ("qwen2_5_omni", []), ("neomme", [])],
)
def test_everything_that_attends_beside_the_language_model_holds_whole_inputs(model, held):
    """Above all never a layer of the language model: its attention would see a slice as the whole."""
    anatomy = anatomy_of(model)
    fusion = anatomy.with_role(Role.FUSION)[0]
    assert towers_held_whole(anatomy, fusion, language_parts(anatomy, fusion)) == held


def test_a_fusion_of_another_form_refuses_slices():
    """GLM-Image scatters into the token ids."""
    steps = pipeline.generate(upstream.load("glm_image")).steps
    step = next(step for step in steps if step.name == "fill_back")
    assert [hit.what.partition(":")[0] for hit in step.outcome.hits] == ["refuses slices"]
    assert "ops.require_whole_sequence(" in step.outcome.module.text


def test_no_class_builds_itself():
    """ShieldGemma2's classifier is the one model of its file written for its config, and builds Gemma3 from that config."""
    anatomy = anatomy_of("shieldgemma2")
    (build,) = anatomy.auto_builds("ShieldGemma2ForImageClassification")
    assert anatomy.target_of(build) == "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize("filled", ["rows", "filled"])
def test_features_land_in_what_the_language_model_gets_whatever_its_name(filled: str):
    source = FillBack.EXAMPLES[0].before.replace("inputs_embeds", "rows")
    source = source.replace("rows = rows.masked", f"{filled} = rows.masked").replace(
        "(rows=rows)", f"(inputs_embeds={filled})"
    )
    text = applied(FillBack(), source).module.text
    assert f"{filled} = rows.masked_scatter(mask, ops.local_features(image_features, mask))" in text


def test_features_that_land_elsewhere_are_refused():
    source = FillBack.EXAMPLES[0].before.replace(
        "inputs_embeds = inputs_embeds.masked", "image_ids = input_ids.masked"
    )
    assert "ops.require_whole_sequence" in applied(FillBack(), source).module.text


def changed(model: str, *edits: tuple[str, str]):
    found = upstream.load(model)
    text = found.text
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return replace(found, text=text)


def test_a_method_of_the_same_name_is_no_question_for_lengths():
    found = changed("qwen3_vl", ("is_flash_attention_requested(self.config)", "self.is_flash_attention_requested()"))
    anatomy = study(source.parse(found.text, found.path), found)
    with pytest.raises(LeftAlone, match="does not choose between lengths"):
        layer_loop(anatomy, anatomy.with_role(Role.VISION)[0])


def test_features_scattered_into_what_no_language_model_gets_are_refused():
    """`noise` goes to a method of the model's own by the name of embeddings."""
    call = "            image_mask, _ = self.get_placeholder_mask(\n"
    noise = "            noise = torch.zeros(7, 1).masked_scatter(input_ids[0] > 0, image_embeds)\n"
    noise += "            self.get_placeholder_mask(input_ids, inputs_embeds=noise, image_features=image_embeds)\n"
    outcome = pipeline.generate(changed("qwen3_vl", (call, noise + call)))
    step = next(step for step in outcome.steps if step.name == "fill_back")
    assert [hit.what for hit in step.outcome.hits] == [
        "refuses slices: `torch.zeros(7, 1).masked_scatter(input_ids[0] > 0, image_embeds)`"
    ]


def test_experts_beside_a_change_in_place_are_left_alone():
    call = "hidden_states = self.experts(hidden_states, topk_indices, topk_weights).view(*orig_shape)\n"
    outcome = pipeline.generate(changed("deepseek_v3", (call, call + "        residuals.mul_(2)\n")))
    step = next(step for step in outcome.steps if step.name == "shared_experts")
    assert not step.outcome.hits and "is written between" in " ".join(step.outcome.notes)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("a = []\nb = c", {"a"}),
        ("a = []\na.append(1)", set()),
        ("a = []\nif c:\n    a = d", set()),
        ("a = b = []", set()),
    ],
)
def test_a_list_is_empty_only_where_nothing_else_touches_it(code, names):
    assert towers_module._lists(ast.parse(code).body) == names


CHECK = "mask.sum() == image_features.shape[0]"


@pytest.mark.parametrize(
    ("counted", "check"),
    [
        ("", "mask.sum() - image_features.shape[0] == 0"),
        ("", "not (mask.sum() - image_features.shape[0]).any()"),
        ("", "torch.equal(mask.sum(), image_features.count)"),
        ("n = 0\n        n += mask.sum()", "n == image_features.shape[0]"),
        ("n = 0\n        for row in mask:\n            n += row.sum()", "n == image_features.shape[0]"),
        ("n: int = mask.sum()", "n == image_features.shape[0]"),
        ("print(n := mask.sum())", "n == image_features.shape[0]"),
    ],
)
def test_a_check_of_placeholders_against_features_lets_slices_pass(counted: str, check: str):
    source = FillBack.EXAMPLES[0].before.replace(CHECK, check)
    source = source.replace("        torch_compilable_check", f"        {counted}\n        torch_compilable_check")
    assert f"ops.is_sliced() or {check}" in applied(FillBack(), source).module.text


@pytest.mark.parametrize(
    "check", ["torch.any(mask)", "mask.sum() > len(input_ids)", "image_features is None or mask.any()"]
)
def test_a_check_of_one_of_them_stays(check: str):
    source = FillBack.EXAMPLES[0].before.replace(CHECK, check)
    assert "ops.is_sliced()" not in applied(FillBack(), source).module.text
