"""What `auto` took: the kernel of each call by its shape, while somebody wants to know.

    with recorded() as taken:
        model(**batch).loss.backward()
    taken["fused_moe"]        # Counter({("triton", (4096, 2048)): 48})

Calls inside of compiled layers are not seen: what is traced once says nothing of how often it runs.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

Taken = dict[str, Counter]

_TAKEN: Taken | None = None


@contextlib.contextmanager
def recorded() -> Iterator[Taken]:
    """By seam, how often each kernel was taken for inputs of each shape, filled within the block."""
    global _TAKEN
    before, _TAKEN = _TAKEN, defaultdict(Counter)
    try:
        yield _TAKEN
    finally:
        _TAKEN = before


def note(seam: str, kernel: str, hidden_states: Tensor) -> None:
    """Says what `auto` takes for a call."""
    if not torch.compiler.is_compiling() and _TAKEN is not None:
        _TAKEN[seam][kernel, tuple(hidden_states.shape)] += 1


def described(taken: Taken) -> list[str]:
    """A line for each seam: its kernels, most calls first, with shapes."""
    lines = []
    for seam, calls in taken.items():
        told = [f"{kernel} {count} x {list(shape)}" for (kernel, shape), count in calls.most_common()]
        lines.append(f"{seam} auto: {', '.join(told)}")
    return lines
