"""Computation that overlaps with a token exchange: shared experts, which need no exchange.

shared = ops.beside_experts(self.shared_experts, residuals)     upstream's MoE block announces it
hidden_states = self.experts(...)                               starts its exchange, computes it, waits
hidden_states + shared()                                        takes the result
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from patchgen.runtime import parallel


class Deferred:
    """A computation that may run before its result is requested; it runs once."""

    def __init__(self, function: Callable[..., Tensor], *args: Tensor) -> None:
        self._pending: Callable[[], Tensor] | None = functools.partial(function, *args)
        self._result: Tensor | None = None

    def compute(self) -> None:
        """Computes the result if it has not been computed."""
        if self._pending is not None:
            self._result, self._pending = self._pending(), None

    def __call__(self) -> Tensor:
        """The result; a second call fails, because it is not kept."""
        self.compute()
        result, self._result = self._result, None
        if result is None:
            raise RuntimeError("The result of an announced computation was requested twice; it is returned only once.")
        return result


def announce(function: Callable[..., Tensor], *args: Tensor) -> Callable[[], Tensor]:
    """Announces a computation to the next exchange of this layer.

    A compiled layer runs it when its result is requested, where it can be fused.
    """
    if torch.compiler.is_compiling():
        return functools.partial(function, *args)
    deferred = Deferred(function, *args)
    parallel.context().announced[:] = [weakref.ref(deferred)]
    return deferred


def compute_announced() -> None:
    """Runs what was announced; called while an exchange is in flight."""
    announced = parallel.context().announced
    while announced:
        deferred = announced.pop()()
        if deferred is not None:
            deferred.compute()
