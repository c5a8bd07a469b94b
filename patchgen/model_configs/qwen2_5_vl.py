from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="qwen2_5_vl", roots=("Qwen2_5_VLForConditionalGeneration",), strict_sync=True)
