"""A text with a mark for each picture, and the pictures, as the model takes them."""

from transformers import BatchFeature, ProcessorMixin


class LatticeMoeProcessor(ProcessorMixin):
    image_token = "<image>"

    def __init__(self, image_processor=None, tokenizer=None, patch_size=8, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.patch_size = patch_size

    def __call__(self, images=None, text=None, return_tensors=None, **kwargs):
        found = dict(self.image_processor(images, return_tensors=return_tensors)) if images else {}
        tokens = (self.image_processor.size // self.patch_size) ** 2
        texts = [one.replace(self.image_token, self.image_token * tokens) for one in text]
        return BatchFeature({**self.tokenizer(texts, return_tensors=return_tensors), **found})
