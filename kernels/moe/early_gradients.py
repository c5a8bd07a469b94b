"""The order of gradients in the backward of experts, so that exchanges with other ranks overlap with computation.

early      gradients of tokens, which other ranks wait for, are handed over before those of weights are computed
deferred   gradients of weights, which nothing waits for, are computed while gradients from other ranks are in flight
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

Sink = Callable[[Tensor, Tensor], None]

_state = threading.local()  # autograd has a thread for each device


def await_gradients(sink: Sink | None) -> None:
    """Registers the function that gets the gradients of tokens and routing weights of the next experts in this backward."""
    _state.sink = sink and (torch._C._current_graph_task_id(), sink)


def is_awaited() -> bool:
    """Whether gradients of tokens should be computed first."""
    return _awaiting() is not None


def _awaiting() -> Sink | None:
    backward, sink = getattr(_state, "sink", None) or (None, None)
    return sink if backward == torch._C._current_graph_task_id() else None  # else left over from a failed backward


def hand_over(tokens: Tensor, weights: Tensor) -> None:
    """Passes on computed (or launched) gradients of tokens `[T, H]` and routing weights `[T, K]` if they are awaited; once."""
    sink = _awaiting()
    if sink is not None:
        _state.sink = None
        sink(tokens, weights)


DEFERRED_GRADIENT_SINK = "_patchgen_deferred_gradient_sink"
"""An attribute of a weight: called with its deferred gradient, before the backward ends."""

_deferred: list[
    tuple[int, Callable[[], None]]
] = []  # (backward, compute); not thread-local: a backward may end in another thread


def defer(weight: Tensor, compute: Callable[[], Tensor]) -> bool:
    """Defers the gradient of `weight` to `compute_deferred`; False if the weight has no sink for it."""
    sink = getattr(weight, DEFERRED_GRADIENT_SINK, None)
    if sink is not None:
        _deferred.append((torch._C._current_graph_task_id(), lambda: sink(compute())))
    return sink is not None


@torch.no_grad()
def compute_deferred() -> None:
    """Computes what was deferred in this backward and those nested in it, on the current stream.

    A failed backward had a smaller id, so what it deferred is not computed here.
    """
    current = torch._C._current_graph_task_id()
    due = [compute for backward, compute in _deferred if backward >= current]
    _deferred[:] = [entry for entry in _deferred if entry[0] < current]
    for compute in due:
        compute()


def discard_deferred() -> None:
    """Discards all that is deferred; for what a failed backward left."""
    _deferred.clear()
