"""The thinker only: training uses neither the talker nor the vocoder."""

from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen3_omni_moe",
    roots=("Qwen3OmniMoeThinkerForConditionalGeneration",),
    expect={
        "dummy_forward": 1,
        "position_id_func": 1,
        "router_loss": 2,
        "fused_loss": 1,
        "vision_sp": 2,
        "audio_sp": 2,
        "fill_back": 1,
        "deepstack_sp": 1,
        "language_sp": 1,
        "position_ids": 1,
        "fused_ops": 4,
        "parallel_plan": 1,
    },
    strict_sync=True,
)
