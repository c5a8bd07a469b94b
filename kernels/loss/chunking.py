"""A limit on the chunk size of the losses, so that a small batch crosses chunk boundaries as a large one does.

with largest_chunk(7):
    model(**batch).loss.backward()      # 40 tokens in six chunks
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_limits: list[int] = []  # of the active blocks, the innermost last


@contextlib.contextmanager
def largest_chunk(tokens: int) -> Iterator[None]:
    """Within the block, chunks of the language-model losses have at most `tokens` tokens.

    Raises:
        ValueError: fewer than one.
    """
    if tokens < 1:
        raise ValueError(f"A chunk must have at least 1 token; found {tokens}.")
    _limits.append(tokens)
    try:
        yield
    finally:
        _limits.pop()


def within_limit(tokens: int) -> int:
    """The number of tokens per chunk under the current limit."""
    return min((tokens, *_limits[-1:]))
