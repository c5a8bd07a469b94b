from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="gemma3", roots=("Gemma3ForConditionalGeneration",), strict_sync=True)
