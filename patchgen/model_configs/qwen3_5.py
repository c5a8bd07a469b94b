from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen3_5", roots=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"), strict_sync=True
)
