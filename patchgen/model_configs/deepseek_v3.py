from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="deepseek_v3",
    roots=("DeepseekV3ForCausalLM",),
    expect={
        "shared_experts": 1,
        "fused_loss": 1,
        "language_sp": 1,
        "fused_ops": 3,
        "parallel_plan": 1,
    },
)
