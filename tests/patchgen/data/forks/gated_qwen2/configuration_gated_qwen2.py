"""The configuration of gated_qwen2."""

from transformers import Qwen2Config


class GatedQwen2Config(Qwen2Config):
    model_type = "gated_qwen2"
