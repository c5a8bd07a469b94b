"""Gradients that other ranks wait for, handed over while the rest of a backward is still to be computed.

with what is awaited in this thread    kernels compute the gradients of tokens first, hand them over, then those of weights
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

Take = Callable[[Tensor, Tensor], None]

_state = threading.local()  # autograd has a thread for each device


def await_gradients(take: Take | None) -> None:
    """Leaves what the next backward of experts hands its gradients of tokens and routing weights to; None: nothing."""
    _state.take = take


def is_awaited() -> bool:
    """Whether gradients of tokens should come first."""
    return getattr(_state, "take", None) is not None


def hand_over(tokens: Tensor, weights: Tensor) -> None:
    """Gives away gradients, `[N, H]` and `[N, K]`, that are computed, or launched: once, if they are awaited."""
    take = getattr(_state, "take", None)
    if take is not None:
        _state.take = None
        take(tokens, weights)
