from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="deepseek_v3", roots=("DeepseekV3ForCausalLM",))
