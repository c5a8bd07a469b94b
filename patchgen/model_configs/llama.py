from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="llama",
    roots=("LlamaForCausalLM",),
    expect={
        "fused_loss": 1,
        "language_sp": 1,
        "fused_ops": 3,
        "parallel_plan": 1,
    },
)
