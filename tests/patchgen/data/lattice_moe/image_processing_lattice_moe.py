"""Pictures of any size as the tower takes them, and how much each was shrunk."""

import numpy as np
from PIL import Image
from transformers import BaseImageProcessor, BatchFeature


class LatticeMoeImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values", "pixel_spacing"]

    def __init__(self, size=16, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def preprocess(self, images, return_tensors=None, **kwargs):
        pictures = [one if isinstance(one, Image.Image) else Image.fromarray(np.asarray(one)) for one in images]
        side = self.size
        pixels = [
            np.asarray(one.convert("RGB").resize((side, side)), dtype=np.float32) / 127.5 - 1 for one in pictures
        ]
        spacing = [(one.height / side, one.width / side) for one in pictures]
        data = {"pixel_values": np.stack(pixels).transpose(0, 3, 1, 2), "pixel_spacing": np.array(spacing, np.float32)}
        return BatchFeature(data, tensor_type=return_tensors)
