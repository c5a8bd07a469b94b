"""Whether the Hugging Face Hub answers, asked once before a command needs it.

Its clients ask again and again, file by file, for minutes. A command that finds no Hub works with what is cached instead.
"""

from __future__ import annotations

import os
import sys
import threading

SECONDS = 8.0
"""The Hub has so long to answer at all; what it says does not matter."""
OFFLINE = "HF_HUB_OFFLINE"


def use_cache_if_silent(seconds: float = SECONDS) -> None:
    """Asks the Hub for its headers; if nothing answers, tells so and takes this process and its children offline."""
    from huggingface_hub import constants

    if constants.is_offline_mode() or (reason := _why_silent(constants.ENDPOINT, seconds)) is None:
        return
    print(
        f"{constants.ENDPOINT} does not answer ({reason}): only files that are here or in the cache are used, as with {OFFLINE}=1.",
        file=sys.stderr,
        flush=True,
    )
    os.environ[OFFLINE] = "1"  # of ranks, which are processes of their own
    constants.HF_HUB_OFFLINE = True
    if (datasets := sys.modules.get("datasets")) is not None:  # imported later, it reads the variable
        datasets.config.HF_HUB_OFFLINE = True


def _why_silent(endpoint: str, seconds: float) -> str | None:
    """Why nothing answered in time; None if something did. In a thread, for looking up a name has no time limit of its own."""
    from huggingface_hub import get_session

    answers: list[str | None] = []

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=seconds)
            answers.append(None)
        except Exception as error:  # whatever it is, nothing was reached: a client of any kind may be configured
            answers.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer in {seconds:.0f} s"
