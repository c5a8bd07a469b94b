from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen3",
    roots=("Qwen3ForCausalLM",),
    expect={
        "fused_loss": 1,
        "language_sp": 1,
        "fused_ops": 3,
        "parallel_plan": 1,
    },
)
