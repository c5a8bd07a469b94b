"""What a backward computes while others wait for it, or while it waits itself.

early    gradients of tokens that other ranks wait for are handed over before those of weights are computed
late     gradients of weights that nobody waits for are computed while gradients from other ranks are on their way
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

Take = Callable[[Tensor, Tensor], None]

_state = threading.local()  # autograd has a thread for each device


def await_gradients(take: Take | None) -> None:
    """Leaves what the next experts of this backward hand their gradients of tokens and routing weights to; None: nothing."""
    _state.take = take and (torch._C._current_graph_task_id(), take)


def is_awaited() -> bool:
    """Whether gradients of tokens should come first."""
    return _awaiting() is not None


def _awaiting() -> Take | None:
    backward, take = getattr(_state, "take", None) or (None, None)
    return take if backward == torch._C._current_graph_task_id() else None  # else left by a backward that failed


def hand_over(tokens: Tensor, weights: Tensor) -> None:
    """Gives away gradients, `[N, H]` and `[N, K]`, that are computed, or launched: once, if they are awaited."""
    take = _awaiting()
    if take is not None:
        _state.take = None
        take(tokens, weights)


TAKES_LATE = "_patchgen_takes_late"
"""An attribute of a weight: called with its gradient, whenever that is computed; until the end of the backward at the latest."""

_late: list[tuple[int, Callable[[], None]]] = []  # with their backward; not of a thread: its end runs in another one


def put_off(weight: Tensor, compute: Callable[[], Tensor]) -> bool:
    """Leaves the gradient of `weight` to `compute_late`, if it is taken then."""
    take = getattr(weight, TAKES_LATE, None)
    if take is not None:
        _late.append((torch._C._current_graph_task_id(), lambda: take(compute())))
    return take is not None


@torch.no_grad()
def compute_late() -> None:
    """Computes what was put off in this backward, and in those inside it, in the order of the current stream.

    A backward that failed had a smaller number: what it left is not computed in another one.
    """
    present = torch._C._current_graph_task_id()
    due = [compute for backward, compute in _late if backward >= present]
    _late[:] = [one for one in _late if one[0] < present]
    for compute in due:
        compute()


def forget_late() -> None:
    """Leaves out what a backward that failed put off."""
    _late.clear()
