"""The number of positions of a config, in the fields that transformers has for it."""

from __future__ import annotations

import pytest
from transformers import BlenderbotConfig, GPT2Config, LEDConfig, MambaConfig, Qwen2_5_VLConfig, XLNetConfig

from patchgen.runtime.config_positions import num_positions


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BlenderbotConfig(), 128),
        (GPT2Config(n_positions=77), 77),
        (Qwen2_5_VLConfig(text_config={"max_position_embeddings": 300}), 300),
        (LEDConfig(max_decoder_position_embeddings=99), 99),
        (XLNetConfig(), None),  # says -1
        (MambaConfig(), None),
    ],
)
def test_the_positions_that_a_config_names(config, expected):
    assert num_positions(config) == expected
