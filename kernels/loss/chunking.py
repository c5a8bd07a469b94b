"""How many tokens the losses take at a time may be limited: a small batch then crosses the bounds of chunks as a large one does.

with largest_chunk(7):
    model(**batch).loss.backward()      # 40 tokens in six chunks
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_LARGEST: int | None = None


@contextlib.contextmanager
def largest_chunk(tokens: int) -> Iterator[None]:
    """Within the block, chunks of the language-model losses hold at most so many tokens.

    Raises:
        ValueError: fewer than one.
    """
    global _LARGEST
    if tokens < 1:
        raise ValueError(f"A chunk holds at least 1 token, not {tokens}.")
    before, _LARGEST = _LARGEST, tokens
    try:
        yield
    finally:
        _LARGEST = before


def limited(tokens: int) -> int:
    """A number of tokens per chunk, within the limit that holds now."""
    return tokens if _LARGEST is None else min(tokens, _LARGEST)
