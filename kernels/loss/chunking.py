"""How many tokens the losses take at a time may be limited: a small batch then crosses the bounds of chunks as a large one does.

with largest_chunk(7):
    model(**batch).loss.backward()      # 40 tokens in six chunks
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_limits: list[int] = []  # of the blocks that run now, the innermost last


@contextlib.contextmanager
def largest_chunk(tokens: int) -> Iterator[None]:
    """Within the block, chunks of the language-model losses hold at most so many tokens.

    Raises:
        ValueError: fewer than one.
    """
    if tokens < 1:
        raise ValueError(f"A chunk holds at least 1 token, not {tokens}.")
    _limits.append(tokens)
    try:
        yield
    finally:
        _limits.pop()


def limited(tokens: int) -> int:
    """A number of tokens per chunk, within the limit that holds now."""
    return min((tokens, *_limits[-1:]))
