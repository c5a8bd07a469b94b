from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="qwen3_moe", roots=("Qwen3MoeForCausalLM",))
