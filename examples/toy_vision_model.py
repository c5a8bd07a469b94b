"""Writes a folder with config, tokenizer and processor of a small gemma3 that sees, without weights: nothing to download.

python examples/toy_vision_model.py runs/toy_vision
"""

from __future__ import annotations

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3Config, Gemma3ImageProcessorPil, Gemma3Processor, PreTrainedTokenizerFast

MARKS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
PARTS = "{% for part in message.content %}{{ '<start_of_image>' if part.type == 'image' else part.text }}{% endfor %}"
TEMPLATE = (
    "{% for message in messages %}<start_of_turn>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}" + PARTS + "<end_of_turn>{% endgeneration %}{% else %}" + PARTS + "<end_of_turn>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, and the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<start_of_turn>", eos_token="<end_of_turn>",
        extra_special_tokens=MARKS,
    )  # fmt: skip


def main(folder: str) -> None:
    tokenizer = byte_tokenizer()
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=4).save_pretrained(folder)
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 7,
    }  # fmt: skip
    marks = {name.replace("token", "token_index"): tokenizer.convert_tokens_to_ids(MARKS[name]) for name in MARKS}
    Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **marks).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
