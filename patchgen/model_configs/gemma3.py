from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="gemma3",
    roots=("Gemma3ForConditionalGeneration",),
    expect={
        "dummy_forward": 1,
        "fused_loss": 1,
        "fill_back": 1,
        "language_sp": 1,
        "parallel_plan": 1,
    },
    strict_sync=True,
)
