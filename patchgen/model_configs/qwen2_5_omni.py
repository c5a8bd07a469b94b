"""The thinker only: training uses neither the talker nor the vocoder."""

from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen2_5_omni",
    roots=("Qwen2_5OmniThinkerForConditionalGeneration",),
    expect={
        "fused_loss": 1,
        "language_sp": 1,
        "position_ids": 1,
        "parallel_plan": 1,
    },
)
