"""chat: a trained model continues a prompt, or holds a session, by transformers' own `generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from patchgen.commands.checkpoints import register
from patchgen.commands.finished_run import model_folder
from patchgen.errors import ConfigError


def chat(
    place: Path, *, prompt: str | None, tokens: int, temperature: float, code: str | None, generated: str | None
) -> None:
    """Prints the answer to `prompt`; without one, to each line of standard input, until it ends or a line is empty.

    A model with a chat template answers the whole conversation so far; another one continues each text by itself.

    Args:
        place: a run's folder, or a checkpoint.
        tokens: the most tokens of an answer.
        temperature: of sampling; 0 takes the likeliest token.
    """
    folder = model_folder(place)
    register(code, generated)
    model, tokenizer = _load(folder)
    options = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    messages: list[dict[str, str]] = []
    for text in [prompt] if prompt is not None else _lines():
        messages.append({"role": "user", "content": text})
        answer = _answer(model, tokenizer, messages, max_new_tokens=tokens, **options)
        messages.append({"role": "assistant", "content": answer})


def _load(folder: Path) -> tuple[Any, Any]:
    """The model and its tokenizer, on the GPU if there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(folder)
        kinds = [
            kind for kind in (AutoModelForCausalLM, AutoModelForMultimodalLM) if type(config) in kind._model_mapping
        ]
        if not kinds:
            raise ConfigError(f"{folder}: transformers has no class that generates text for '{config.model_type}'.")
        model = kinds[0].from_pretrained(
            folder, dtype="auto", device_map="cuda" if torch.cuda.is_available() else None
        )
        return model.eval(), AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be loaded: {error}") from error


def _answer(model: Any, tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> str:
    """What the model says next, printed as it comes."""
    from transformers import TextStreamer

    if tokenizer.chat_template is None:
        inputs = tokenizer(messages[-1]["content"], return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    made = model.generate(**inputs, streamer=streamer, **options)
    return tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _lines() -> Any:
    """The lines of standard input up to an empty one, after a mark where someone types them."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return
        yield line
