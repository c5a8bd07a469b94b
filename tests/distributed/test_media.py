"""Multimodal models on real ranks against upstream's own class on one rank: loss and every gradient, 1e-5 in fp32.

A run takes one model of each kind of tower; all models and layouts are slow: `make test-parallel`, and `make verify-all`
writes them into `verify_ranks.json`.
"""

from __future__ import annotations

import cases_media as cases
import pytest

MODELS = (
    "qwen3_omni_moe",
    "qwen2_5_omni",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma3",
    "glm4v_moe",
)
# FSDP2 on both: what differs from whole parameters is proven by the other tests here.
SOME = [
    pytest.param("qwen3_vl", "mixed", id="deepstack"),
    pytest.param("qwen3_vl", "boundary", id="an image across two slices"),
    pytest.param("qwen3_vl", "first", id="an image in one slice only"),
    pytest.param("qwen3_vl", "text", id="none"),
    pytest.param("qwen3_omni_moe", "sound", id="video with its audio"),
    pytest.param("qwen2_5_vl", "packed", id="windows, packed"),
    pytest.param("gemma3", "boundary", id="whole images, two-way attention over them"),
    pytest.param("gemma3", "packed", id="whole images, two-way attention, packed"),
]
LAYOUTS = [
    pytest.param({"sp": 2, "fsdp": False}, id="SP2, whole parameters"),
    pytest.param({"sp": 2}, id="SP2, FSDP"),
    pytest.param({"sp": 4, "fsdp": False}, id="SP4, whole parameters"),
    pytest.param({"sp": 4}, id="SP4, FSDP"),
    pytest.param({"sp": 2, "training": False}, id="SP2, evaluation mode"),
]


@pytest.mark.parametrize(("model", "name"), SOME)
@pytest.mark.sampled(3)
def test_a_batch_on_two_slices(model, name, two_ranks):
    two_ranks.run(cases.agrees, model, name, sp=2)


def test_two_way_attention_in_packed_rows_that_are_not_sliced(two_ranks):
    two_ranks.run(cases.agrees, "gemma3", "packed", sp=1, fsdp=False)


def test_fill_back_in_evaluation_mode(two_ranks):
    two_ranks.run(cases.agrees, "qwen3_omni_moe", "mixed", sp=2, fsdp=False, training=False)


@pytest.mark.parametrize("undivided", [False, True], ids=["divided", "heads that do not divide"])
def test_layers_that_run_again_in_the_backward(undivided, two_ranks):
    two_ranks.run(cases.agrees_with, "qwen2_5_vl", "images", sp=2, undivided=undivided, recomputed=True)


def test_one_modality_per_rank(four_ranks):
    """Images, video, audio and text only, moved on by one rank each step; the pool is the watchdog."""
    four_ranks.run(cases.steps_agree, "qwen3_omni_moe", sp=1, num_steps=2, timeout=60)


def test_a_projector_beside_the_towers_method_has_its_gradient_on_ranks_without_images(two_ranks):
    """llama4 calls `multi_modal_projector` in its forward, and only where there are images: one rank has none."""
    two_ranks.run(cases.steps_agree, "llama4", sp=1, num_steps=2, timeout=60)


@pytest.mark.parametrize("model", ["llama4", "qwen3_vl"])
def test_a_tower_that_no_rank_had_an_image_for_is_not_updated(model, two_ranks):
    """It ran on every rank, and on one rank it would not have: no decay, no moments."""
    for text, image in two_ranks.run(cases.steps_without_images, model, timeout=60):
        assert text[0] == text[1] < image[0] == image[1]


def test_wrong_inputs_are_refused(two_ranks):
    two_ranks.run(cases.features_that_are_not_the_tokens_are_refused)
    two_ranks.run(cases.masks_made_of_slices_are_refused)


def test_minimal_inputs_are_found_without_collectives_or_refused_on_all_ranks(two_ranks):
    two_ranks.run(cases.minimal_inputs_of_a_sharded_model, "gemma3", timeout=60)
    two_ranks.run(cases.a_tower_without_a_minimal_input_is_refused_on_all_ranks, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_batch(model, layout, four_ranks):
    four_ranks.run(cases.every_batch_agrees, model, **layout)


@pytest.mark.slow
@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_of_one_modality_per_rank(model, sp, four_ranks):
    four_ranks.run(cases.steps_agree, model, sp=sp, num_steps=10, timeout=60)
