"""The thinker only: training uses neither the talker nor the vocoder."""

from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="qwen3_omni_moe", roots=("Qwen3OmniMoeThinkerForConditionalGeneration",), strict_sync=True)
