"""chat: a trained model continues a prompt, or holds a session, by transformers' own `generate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from patchgen.commands.checkpoints import register
from patchgen.commands.finished_run import model_folder
from patchgen.errors import ConfigError


def chat(
    place: Path, *, prompt: str | None, tokens: int, temperature: float, code: str | None, generated: str | None
) -> None:
    """Prints the answer to `prompt`; without one, to each line of standard input, until it ends or a line is empty.

    Args:
        place: a run's folder, or a checkpoint.
        tokens: the most tokens of an answer.
        temperature: of sampling; 0 takes the likeliest token.
    """
    folder = model_folder(place)
    register(code, generated)
    from patchgen.runtime.chat import Session

    try:
        session = Session(folder, tokens=tokens, temperature=temperature)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be loaded: {error}") from error
    for text in [prompt] if prompt is not None else _lines():
        session.answer(text)


def _lines() -> Iterator[str]:
    """The lines of standard input up to an empty one, after a mark where someone types them."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return
        yield line
