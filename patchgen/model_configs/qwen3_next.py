from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="qwen3_next", roots=("Qwen3NextForCausalLM",))
