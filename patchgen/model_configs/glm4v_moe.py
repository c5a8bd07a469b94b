from patchgen.model_configs import ModelConfig

CONFIG = ModelConfig(
    model="glm4v_moe",
    roots=("Glm4vMoeForConditionalGeneration",),
    expect={
        "dummy_forward": 1,
        "position_id_func": 2,
        "shared_experts": 1,
        "router_loss": 2,
        "fused_loss": 1,
        "vision_sp": 2,
        "fill_back": 1,
        "language_sp": 1,
        "position_ids": 1,
        "parallel_plan": 1,
    },
    strict_sync=True,
)
