"""The real processors of transformers with a small tokenizer, and torchvision for those that need it.

torchvision is only published built for CUDA; beside torch for the CPU its own operators do not load, and nothing here
calls them. It lies in a folder of its own (`make setup-test`), so that nobody else finds it: `use_torchvision` must run
before transformers is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

TORCHVISION = Path(sys.prefix) / "torchvision-for-tests"
OWN_OPERATORS = ("nms", "qnms")

MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CONTENT = (
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}IMAGE{%- elif part.type == 'video' -%}VIDEO"
    "{%- elif part.type == 'audio' -%}AUDIO{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}"
)
TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}{%- if message.role == 'assistant' -%}"
    "{% generation %}" + CONTENT + "{{ '<|im_end|>' }}{% endgeneration %}"
    "{%- else -%}" + CONTENT + "{{ '<|im_end|>' }}{%- endif -%}{{ '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def use_torchvision() -> None:
    """Makes torchvision importable for transformers in this process."""
    import torch

    sys.path.append(str(TORCHVISION))
    for name in OWN_OPERATORS:
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def template(image: str = "", video: str = "", audio: str = "", *, marked: bool = True) -> str:
    text = TEMPLATE.replace("IMAGE", image).replace("VIDEO", video).replace("AUDIO", audio)
    return text if marked else text.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def byte_tokenizer(chat_template: str, extra: dict[str, str]) -> Any:
    """One token per byte, and the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: n for n, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=chat_template,
        extra_special_tokens=extra,
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]}, replace_extra_special_tokens=False)
    return fast


def omni_processor(*, marked: bool = True, mel_bins: int = 32, patch_size: int = 14, n_window: int = 50) -> Any:
    """Images, videos and sounds; needs torchvision."""
    from transformers import Qwen3OmniMoeProcessor

    processor = Qwen3OmniMoeProcessor(**_omni_parts(marked, mel_bins, patch_size))
    processor.n_window = n_window
    processor.videos_kwargs = {"size": _size(patch_size)}
    return processor


def older_omni_processor(*, marked: bool = True) -> Any:
    """As `omni_processor`, of the generation before."""
    from transformers import Qwen2_5OmniProcessor

    processor = Qwen2_5OmniProcessor(**_omni_parts(marked, 32, 14))
    processor.videos_kwargs = {"size": _size(14)}
    return processor


def _size(patch_size: int) -> dict[str, int]:
    side = 2 * patch_size
    return {"shortest_edge": side**2, "longest_edge": side**2 * 16}


def _omni_parts(marked: bool, mel_bins: int, patch_size: int) -> dict[str, Any]:
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor, WhisperFeatureExtractor

    vision, sound = "<|vision_start|>{}<|vision_end|>", "<|audio_start|><|audio_pad|><|audio_end|>"
    text = template(vision.format("<|image_pad|>"), vision.format("<|video_pad|>"), sound, marked=marked)
    size = _size(patch_size)
    return {
        "image_processor": Qwen2VLImageProcessor(size=size, patch_size=patch_size),
        "video_processor": Qwen2VLVideoProcessor(size=size, patch_size=patch_size, cap_pixels_per_frame=False),
        "feature_extractor": WhisperFeatureExtractor(feature_size=mel_bins, chunk_length=2),
        "tokenizer": byte_tokenizer(text, MARKS),
        "chat_template": text,
    }


def vision_processor(name: str, *, marked: bool = True) -> Any:
    """Images and videos: `Qwen2VL`, `Qwen2_5_VL`, `Qwen3VL`, `Glm4v`; needs torchvision."""
    import transformers

    vision = "<|vision_start|>{}<|vision_end|>"
    image, video = vision.format("<|image_pad|>"), vision.format("<|video_pad|>")
    if name == "Qwen3VL":
        video = "<|video_pad|>"  # its processor puts the marks around each frame
    text = template(image, video, marked=marked)
    size = _size(14)
    if name == "Glm4v":
        size = {"shortest_edge": 112 * 112, "longest_edge": 28**2 * 64}
        image_class, video_class = transformers.Glm4vImageProcessor, transformers.Glm4vVideoProcessor
    else:
        image_class = transformers.Qwen2VLImageProcessor
        video_class = transformers.Qwen3VLVideoProcessor if name == "Qwen3VL" else transformers.Qwen2VLVideoProcessor
    options = {"cap_pixels_per_frame": False} if video_class is transformers.Qwen2VLVideoProcessor else {}
    marks = {**MARKS, "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    return getattr(transformers, f"{name}Processor")(
        image_processor=image_class(size=size, patch_size=14),
        tokenizer=byte_tokenizer(text, marks),
        video_processor=video_class(size=size, patch_size=14, **options),
        chat_template=text,
    )


def gemma_processor(*, marked: bool = True) -> Any:
    """Images only, another mark in the text than where its features go; needs torchvision."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    text = template("<start_of_image>", marked=marked)
    marks = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": 28, "width": 28}),
        tokenizer=byte_tokenizer(text, marks),
        chat_template=text,
        image_seq_length=4,
    )


def image_processor(*, marks: dict[str, str] | None = None) -> Any:
    """Images only, without torchvision; `marks` are the tokenizer's special tokens."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    text = template("<image>", marked=False)
    size = {"height": 28, "width": 28}
    return LlavaProcessor(
        CLIPImageProcessorPil(size=size, crop_size=size),
        byte_tokenizer(text, {"image_token": "<image>"} if marks is None else marks),
        patch_size=14,
        vision_feature_select_strategy="full",
        chat_template=text,
    )


def audio_processor() -> Any:
    """Sounds only."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    text = template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>", marked=False)
    marks = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    return Qwen2AudioProcessor(
        WhisperFeatureExtractor(feature_size=16, chunk_length=1), byte_tokenizer(text, marks), chat_template=text
    )
