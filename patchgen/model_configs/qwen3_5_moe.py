from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen3_5_moe", roots=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"), strict_sync=True
)
