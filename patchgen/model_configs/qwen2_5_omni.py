"""The thinker only: training uses neither the talker nor the vocoder."""

from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen2_5_omni",
    roots=("Qwen2_5OmniThinkerForConditionalGeneration",),
    allow_sync={
        "get_audio_features": "upstream's check that sounds give as many features as they should",
    },
    strict_sync=True,
)
