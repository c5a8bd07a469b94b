"""A session with a trained model, by transformers' own classes and `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    TextStreamer,
)


class Session:
    """What was said so far, and the model that answers.

    A model with a chat template answers the whole conversation; another one continues each text by itself.

    Attributes:
        messages: as chat templates take them.
    """

    def __init__(self, folder: Path, *, tokens: int, temperature: float) -> None:
        """Loads the model, onto the GPU if there is one.

        Args:
            tokens: the most tokens of an answer.
            temperature: of sampling; 0 takes the likeliest token.

        Raises:
            ValueError: transformers has no class for it that generates text.
            OSError: a file is missing.
        """
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kinds = [
            kind for kind in (AutoModelForCausalLM, AutoModelForMultimodalLM) if type(config) in kind._model_mapping
        ]
        if not kinds:
            raise ValueError(f"transformers has no class that generates text for '{config.model_type}'")
        place = "cuda" if torch.cuda.is_available() else None
        loaded = kinds[0].from_pretrained(folder, dtype="auto", device_map=place, trust_remote_code=False)
        self.model: Any = loaded.eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": temperature > 0}
        self.options |= {"temperature": temperature} if temperature > 0 else {}
        self.messages: list[dict[str, str]] = []

    def answer(self, text: str) -> str:
        """What the model says to a user's text, printed as it comes."""
        self.messages.append({"role": "user", "content": text})
        if self.tokenizer.chat_template is None:
            inputs = self.tokenizer(text, return_tensors="pt")
        else:
            inputs = self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        inputs = {name: inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        made = self.model.generate(**inputs, streamer=streamer, **self.options)
        answer = self.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer
