from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen3_next",
    roots=("Qwen3NextForCausalLM",),
    expect={
        "shared_experts": 1,
        "router_loss": 2,
        "fused_loss": 1,
        "language_sp": 1,
        "mixer_sp": 1,
        "fused_ops": 2,
        "parallel_plan": 1,
    },
)
