from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen2_vl",
    roots=("Qwen2VLForConditionalGeneration",),
    expect={
        "fused_loss": 1,
        "language_sp": 1,
        "position_ids": 1,
        "fused_ops": 3,
        "parallel_plan": 1,
    },
)
