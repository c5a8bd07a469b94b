from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen3_5",
    roots=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    expect={
        "dummy_forward": 1,
        "position_id_func": 2,
        "fused_loss": 2,
        "language_sp": 1,
        "position_ids": 1,
        "mixer_sp": 1,
        "parallel_plan": 2,
    },
    strict_sync=True,
)
