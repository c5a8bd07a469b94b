from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="mixtral",
    roots=("MixtralForCausalLM",),
    expect={
        "router_loss": 2,
        "fused_loss": 1,
        "language_sp": 1,
        "fused_ops": 2,
        "parallel_plan": 1,
    },
)
