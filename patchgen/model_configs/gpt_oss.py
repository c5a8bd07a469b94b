from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(model="gpt_oss", roots=("GptOssForCausalLM",))
