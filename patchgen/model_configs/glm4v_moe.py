from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="glm4v_moe", roots=("Glm4vMoeForConditionalGeneration",), strict_sync=True)
