"""The configuration of shared_moe."""

from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig


class SharedMoeConfig(Qwen3MoeConfig):
    model_type = "shared_moe"
