from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="qwen2_vl", roots=("Qwen2VLForConditionalGeneration",), strict_sync=True)
