from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="qwen3_5_moe",
    roots=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    expect={
        "dummy_forward": 1,
        "position_id_func": 2,
        "shared_experts": 1,
        "router_loss": 3,
        "fused_loss": 2,
        "language_sp": 1,
        "position_ids": 1,
        "mixer_sp": 1,
        "parallel_plan": 2,
    },
    strict_sync=True,
)
