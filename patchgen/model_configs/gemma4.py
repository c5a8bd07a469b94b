from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="gemma4", roots=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"))
