"""Qwen2.5-VL with a projection of the features of images."""

from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from .configuration_projected_vl import ProjectedVLConfig


class ProjectedVLModel(Qwen2_5_VLModel):
    config: ProjectedVLConfig

    def __init__(self, config):
        super().__init__(config)
        self.projector = nn.Linear(config.vision_config.out_hidden_size, config.text_config.hidden_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values, image_grid_thw=None, **kwargs):
        output = super().get_image_features(pixel_values, image_grid_thw, **kwargs)
        output.pooler_output = tuple(self.projector(image) for image in output.pooler_output)
        return output


class ProjectedVLForConditionalGeneration(Qwen2_5_VLForConditionalGeneration):
    config: ProjectedVLConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = ProjectedVLModel(config)
        self.post_init()
