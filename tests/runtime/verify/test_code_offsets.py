"""Small configs of models whose images and sounds become codes of the vocabulary; samples per token of convolutions."""

from __future__ import annotations

from types import SimpleNamespace

from patchgen.runtime.media_sizes import samples_per_token
from patchgen.runtime.verify.field_relations import code_offsets


def part(codes: int) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(codebook_size=codes))


def test_codes_of_each_tokenizer_follow_one_another_below_the_special_ids():
    """131,272 + 131,072 codes of images = 262,344, where those of sounds begin: as small, 64 + 16 = 80, and 80 + 16 = 96."""
    values = {"image_token_offset": 131_272, "audio_token_offset": 262_344, "image_token_id": 131_079}
    parts = {"vision_config": part(16), "audio_config": part(16)}
    assert code_offsets(values, parts, 96) == {"image_token_offset": 64, "audio_token_offset": 80}
    assert code_offsets(values, {"vision_config": part(16)}, 96) == {"image_token_offset": 80}


def test_samples_per_token_are_the_steps_of_the_convolutions_where_no_field_says_them():
    audio = SimpleNamespace(conv_stride=(5, 2, 2, 2, 2, 2, 2))
    config = SimpleNamespace(sub_configs={"audio_config": None}, audio_config=audio)
    assert samples_per_token(config) == 320
    audio.hop_length = 160
    assert samples_per_token(config) == 160
