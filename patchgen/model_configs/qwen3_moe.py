from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen3_moe",
    roots=("Qwen3MoeForCausalLM",),
    expect={
        "router_loss": 2,
        "fused_loss": 1,
        "language_sp": 1,
        "fused_ops": 3,
        "parallel_plan": 1,
    },
)
