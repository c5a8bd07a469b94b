"""The configuration of projected_vl."""

from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig


class ProjectedVLConfig(Qwen2_5_VLConfig):
    model_type = "projected_vl"
