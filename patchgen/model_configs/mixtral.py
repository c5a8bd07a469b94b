from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="mixtral", roots=("MixtralForCausalLM",))
