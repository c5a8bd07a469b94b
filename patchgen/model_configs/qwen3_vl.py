from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="qwen3_vl", roots=("Qwen3VLForConditionalGeneration",), strict_sync=True)
