"""Relations between the configs of a composite hold in the small ones as in the full ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedConfig

from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify.field_relations import chunk_lengths, layer_numbers, relate_parts
from patchgen.runtime.verify.small_config import SmallConfig, small_config
from patchgen.runtime.verify.small_values import _SECTIONS_READ, split


def sub_config(full: dict, **small: object) -> SmallConfig:
    return SmallConfig(PreTrainedConfig(**small), PreTrainedConfig(**full), {})


@given(st.lists(st.integers(-24, 23), min_size=1, max_size=4), st.integers(1, 24))
def test_layers_of_a_tower_are_layers_that_it_has(numbers, count):
    vision = sub_config({"num_hidden_layers": 24}, num_hidden_layers=count)
    found = layer_numbers({"vision_feature_layers": numbers}, {"vision_config": vision})
    small = found.get("vision_feature_layers", numbers)
    assert all(-count <= number < count for number in small)
    assert [number < 0 for number in small] == [number < 0 for number in numbers]
    pairs = sorted(zip(numbers, small, strict=True))
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(pairs) if (a[0] < 0) == (b[0] < 0))


def test_two_layers_stay_two_and_in_their_order():
    """Else a model that swapped them would compute the same."""
    adapter = small_config("molmo2").config.adapter_config
    assert adapter.vision_feature_layer == [1, 0]  # of two; 24 and 18 of upstream's 25


def test_another_towers_layers_are_left_alone():
    assert layer_numbers({"audio_feature_layer": 20}, {"vision_config": sub_config({}, num_hidden_layers=2)}) == {}


@pytest.mark.parametrize("model_type", ["voxtral", "glmasr"])
def test_frames_that_a_projector_groups_are_whole(model_type):
    audio = small_config(model_type).config.audio_config
    assert audio.intermediate_size == 4 * audio.hidden_size


def test_groups_are_read_off_the_modeling_file():
    def part() -> SmallConfig:
        return sub_config({"hidden_size": 8, "inner": 24}, hidden_size=4, inner=5)

    read, other = part(), part()
    relate_parts({"audio_config": read}, "y = x.reshape(x.shape[0], -1, self.config.audio_config.inner)")
    relate_parts({"audio_config": other}, "nn.Linear(config.audio_config.inner, 3)")
    assert read.config.inner == 12
    assert other.config.inner == 5


def test_a_chunk_of_samples_holds_whole_hops():
    config = small_config("vibevoice_asr").config
    hop = config.acoustic_tokenizer_encoder_config.hop_length
    assert hop < 100
    assert config.acoustic_tokenizer_chunk_size % hop == 0
    tower = sub_config({"hop_length": 100}, hop_length=6)
    assert chunk_lengths({"chunk_size": 700}, {"audio_config": tower}) == {"chunk_size": 48}
    assert chunk_lengths({"chunk_size": 701}, {"audio_config": tower}) == {}


@given(st.integers(1, 20).flatmap(lambda a: st.tuples(st.just(a), st.integers(1, 20))), st.integers(0, 3))
def test_equal_sections_stay_equal(sizes, extra):
    twin, single = sizes
    parts = split(8 + 2 * extra, [twin, twin, single])
    assert sum(parts) == 8 + 2 * extra
    assert parts[0] == parts[1] or single == twin


@pytest.mark.parametrize(
    ("model_type", "sections"),
    [
        ("ernie4_5_vl_moe", [3, 3, 2]),  # interleaves the first two: they are equal
        ("hunyuan_vl", [4, 2, 2]),  # falls back to nothing
        ("qwen2_vl", [2, 3, 3]),
    ],
)
def test_sections_of_the_rotary_embedding(model_type, sections):
    assert small_config(model_type).config.text_config.rope_parameters["mrope_section"] == sections


@pytest.mark.parametrize(
    ("read", "fallback"),
    [
        ('self.config.rope_parameters["mrope_section"]', None),  # of older releases
        ('config.rope_parameters.get("mrope_section")', None),
        ('rope_params.get("mrope_section", [24, 20, 20])', "24, 20, 20"),
    ],
)
def test_sections_are_read_with_and_without_a_fallback(read, fallback):
    assert _SECTIONS_READ.search(f"x = f({read}, y)")[1] == fallback


def test_ids_that_a_model_falls_back_to_are_in_the_small_vocabulary():
    config = small_config("shieldgemma2").config
    assert {config.yes_token_index, config.no_token_index} <= set(range(128 - 32, 128))


def test_a_mask_that_is_always_made_gets_its_window():
    """By default the class gives none, and its model refuses every batch."""
    assert small_config("step3p7").config.text_config.sliding_window == 8
    assert small_config("smollm3").config.sliding_window is None  # has a switch, which is off


@pytest.mark.parametrize("model_type", ["chameleon", "emu3"])
def test_a_vocabulary_has_an_id_of_its_own_for_each_code_of_an_image(model_type):
    config = small_config(model_type).config
    ids = list(config.vocabulary_map.values())
    assert len(set(ids)) == len(ids) > sizes.NUM_IMAGE_CODES
    assert config.image_token_id in ids
    assert min(ids) >= sizes.VOCAB - sizes.NUM_RESERVED_IDS, "text that is drawn holds no image"


def test_layers_of_the_text_that_a_composite_names_are_there():
    config = small_config("granite4_vision").config
    named = config.spatial_target_layers
    assert len(set(named)) == 4
    assert max(named) < config.text_config.num_hidden_layers


def test_what_stands_for_an_image_stands_for_no_sound():
    config = small_config("phi4_multimodal").config
    assert config.vision_config.image_token_id != config.audio_config.audio_token_id


def test_a_width_that_is_a_part_of_another_stays_that_part():
    config = small_config("fun_asr_nano").config
    assert config.adaptor_config.intermediate_size * 4 == config.text_config.hidden_size
