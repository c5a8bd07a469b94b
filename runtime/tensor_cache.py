"""Values that follow from what a tensor holds, or from a module, computed once: for all layers of a step, not for each.

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
    """`compute(tensor)`, remembered as long as the tensor (or module) lives and nobody writes to it."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._kept = WeakIdKeyDictionary()

    def __call__(self, tensor: Tensor | nn.Module) -> T:
        version = tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else None
        kept = self._kept.get(tensor)
        if kept is None or kept[0] != version:
            kept = self._kept[tensor] = (version, self._compute(tensor))
        return kept[1]


longest = TensorCache(lambda bounds: int(bounds.diff().max()))
"""The longest document between bounds: one host sync per batch, where lengths did not come as numbers."""
