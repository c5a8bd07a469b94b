"""Values derived from a tensor or module, computed once for all layers of a step.

ends = TensorCache(lambda bounds: bounds.tolist())
ends(cu_seq_lens)             # waits for the device the first time
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")


class TensorCache(Generic[T]):
    """`compute(tensor)`, cached while the tensor (or module) lives and is not written to."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._cached = WeakIdKeyDictionary()

    def __call__(self, tensor: Tensor | nn.Module) -> T:
        version = tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else None
        cached = self._cached.get(tensor)
        if cached is None or cached[0] != version:
            cached = self._cached[tensor] = (version, self._compute(tensor))
        return cached[1]


longest = TensorCache(lambda bounds: int(bounds.diff().max()))
"""The longest document between bounds: one host sync per batch, if lengths are only on the device."""
