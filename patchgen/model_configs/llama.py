from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="llama", roots=("LlamaForCausalLM",))
