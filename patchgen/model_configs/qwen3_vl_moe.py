from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="qwen3_vl_moe", roots=("Qwen3VLMoeForConditionalGeneration",), strict_sync=True)
