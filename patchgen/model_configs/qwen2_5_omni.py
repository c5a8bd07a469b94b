"""The thinker only: training uses neither the talker nor the vocoder."""

from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen2_5_omni",
    roots=("Qwen2_5OmniThinkerForConditionalGeneration",),
    expect={
        "dummy_forward": 1,
        "position_id_func": 1,
        "fused_loss": 1,
        "vision_sp": 2,
        "audio_sp": 2,
        "fill_back": 1,
        "language_sp": 1,
        "position_ids": 1,
        "parallel_plan": 1,
    },
    allow_sync={
        "Qwen2_5OmniThinkerModel.get_audio_features": "upstream's check that sounds give as many features as they should",
    },
    strict_sync=True,
)
