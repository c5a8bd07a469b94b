from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="qwen3", roots=("Qwen3ForCausalLM",))
