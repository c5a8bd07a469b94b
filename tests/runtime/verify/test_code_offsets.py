"""Small configs of models whose images and sounds become codes of the vocabulary; samples per token of convolutions."""

from __future__ import annotations

from types import SimpleNamespace

from patchgen.runtime.media_sizes import samples_per_token
from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify.field_relations import code_offsets
from patchgen.runtime.verify.small_config import small_config


def part(codes: int) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(codebook_size=codes))


def test_codes_of_each_tokenizer_follow_one_another_below_the_special_ids():
    """131,272 + 131,072 codes of images = 262,344, where those of sounds begin: as small, 64 + 16 = 80, and 80 + 16 = 96."""
    values = {"image_token_offset": 131_272, "audio_token_offset": 262_344, "image_token_id": 131_079}
    parts = {"vision_config": part(16), "audio_config": part(16)}
    assert code_offsets(values, parts, 96) == {"image_token_offset": 64, "audio_token_offset": 80}
    assert code_offsets(values, {"vision_config": part(16)}, 96) == {"image_token_offset": 80}


def test_the_small_config_of_a_model_with_such_codes_has_them_inside_its_vocabulary():
    """apertus1p5, whose full offsets are 131,272 and 262,344: codes of images, codes of sounds, special ids, end."""
    config = small_config("apertus1p5").config
    ends = (
        config.image_token_offset + config.vision_config.codebook_size,
        config.audio_token_offset + config.audio_config.codebook_size,
    )
    special = [value for name, value in vars(config).items() if name.endswith("_token_id") and value is not None]
    assert config.image_token_offset > 0 and ends[0] == config.audio_token_offset
    assert special and ends[1] <= min(special) <= max(special) < sizes.VOCAB


def test_a_codebook_as_wide_as_its_encoder_is_so_in_the_small_form():
    """Nothing projects between them; mimi's is half as wide as its encoder in full, and is not made as wide."""
    sounds, mimi = small_config("apertus1p5").config.audio_config, small_config("mimi").config
    assert sounds.codebook_dim == sounds.hidden_size == sizes.HIDDEN
    assert mimi.codebook_dim != mimi.hidden_size


def test_the_number_of_one_part_goes_before_the_convolutions_of_another():
    """Whichever sub-config comes first."""
    towers = {"audio_config": SimpleNamespace(conv_stride=(5, 2)), "codec_config": SimpleNamespace(hop_length=160)}
    for names in (list(towers), list(towers)[::-1]):
        assert samples_per_token(SimpleNamespace(sub_configs=dict.fromkeys(names), **towers)) == 160


def test_samples_per_token_are_the_steps_of_the_convolutions_where_no_field_says_them():
    audio = SimpleNamespace(conv_stride=(5, 2, 2, 2, 2, 2, 2))
    config = SimpleNamespace(sub_configs={"audio_config": None}, audio_config=audio)
    assert samples_per_token(config) == 320
    audio.hop_length = 160
    assert samples_per_token(config) == 160
