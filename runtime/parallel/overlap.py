"""What is computed beside an exchange of tokens: shared experts, which need no exchange.

shared = beside.Beside(self.shared_experts, residuals)      upstream's MoE block announces it
hidden_states = self.experts(...)                           starts its exchange, computes it, waits
hidden_states + shared()                                    takes the result
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from patchgen.runtime import parallel


class Beside:
    """A computation that may run before its result is asked for; it runs once."""

    def __init__(self, function: Callable[..., Tensor], *args: Tensor) -> None:
        self._function, self._args = function, args
        self._result: Tensor | None = None

    def compute(self) -> None:
        """Computes the result, unless it was."""
        if self._result is None:
            self._result = self._function(*self._args)
            self._args = ()

    def __call__(self) -> Tensor:
        """The result, handed out once: it is not kept alive here."""
        self.compute()
        result, self._result = self._result, None
        if result is None:
            raise RuntimeError("The result of a computation that was announced is handed out once.")
        return result


def announce(function: Callable[..., Tensor], *args: Tensor) -> Callable[[], Tensor]:
    """Leaves a computation for the next exchange of this layer.

    A compiled layer computes it where its result is taken: there it is fused, and no exchange is seen.
    """
    if torch.compiler.is_compiling():
        return functools.partial(function, *args)
    beside = Beside(function, *args)
    parallel.context().announced[:] = [weakref.ref(beside)]
    return beside


def compute_announced() -> None:
    """Computes what was announced; called while an exchange is under way."""
    announced = parallel.context().announced
    while announced:
        beside = announced.pop()()
        if beside is not None:
            beside.compute()
