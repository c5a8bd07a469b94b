from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="gpt_oss",
    roots=("GptOssForCausalLM",),
    expect={
        "router_loss": 2,
        "fused_loss": 1,
        "language_sp": 1,
        "fused_ops": 1,
        "parallel_plan": 1,
    },
)
