"""Low-rank adapters of stacked experts, added to a frozen stacked weight without computing the merged weight.

    x @ (W[e] + scale * left[e] @ right[e])^T  =  x @ W[e]^T + scale * (x @ right[e]^T) @ left[e]^T

two thin grouped products in addition to that of the weight; the merged weight and its gradient never exist.

    E experts   K inner size   N output size   r rank
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.kernels.moe.grouped_product import grouped_product

ROW_BYTES = 16
"""Grouped products read rows in multiples of 16 bytes; ranks are padded with zeros."""


class LowRank(NamedTuple):
    """The adapter of one stacked weight, `scale * left @ right`, of the weight's shape.

    Attributes:
        left: `[E, N, r]` for a weight `[E, N, K]`; `[E, K, r]` for a transposed one `[E, K, N]`.
        right: `[E, r, K]`; `[E, r, N]`.
    """

    left: Tensor
    right: Tensor
    scale: float

    def factors(self, is_transposed: bool) -> tuple[Tensor, Tensor]:
        """`(a [E, r, K], b [E, N, r])`: rows are multiplied by a, then by b."""
        if is_transposed:
            return self.left.transpose(1, 2), self.right.transpose(1, 2)
        return self.right, self.left

    def to(self, dtype: torch.dtype) -> LowRank:
        return LowRank(self.left.to(dtype), self.right.to(dtype), self.scale)

    def padded(self) -> LowRank:
        """Zero-padded to a rank of a multiple of 16 bytes, which changes no sum."""
        missing = -self.left.shape[2] % (ROW_BYTES // self.left.element_size())
        if not missing:
            return self
        return LowRank(F.pad(self.left, (0, missing)), F.pad(self.right, (0, 0, 0, missing)), self.scale)

    def check(self, name: str, weight: Tensor) -> None:
        """Raises ValueError if the factors do not match the weight."""
        num_experts, first, second = weight.shape
        rank = self.left.shape[-1]
        expected = ((num_experts, first, rank), (num_experts, rank, second))
        shapes = (tuple(self.left.shape), tuple(self.right.shape))
        if shapes != expected or rank < 1:
            raise ValueError(
                f"fused_moe: the adapter of {name} {tuple(weight.shape)} must have factors {expected[0]} and "
                f"{expected[1]} of one rank; found {shapes[0]} and {shapes[1]}."
            )
        for factor in (self.left, self.right):
            if factor.dtype != weight.dtype:
                raise ValueError(
                    f"fused_moe: the adapter of {name} is {factor.dtype} but the weight is {weight.dtype}. To fix: cast it."
                )


class ExpertAdapters(NamedTuple):
    """The adapters of one call of the fused experts; None: no adapter for that weight."""

    gate_up: LowRank | None = None
    down: LowRank | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All factors."""
        return tuple(factor for adapter in self if adapter is not None for factor in (adapter.left, adapter.right))


NO_ADAPTERS = ExpertAdapters()


def add_low_rank(
    product_RN: Tensor, rows_RK: Tensor, adapter: LowRank | None, ends_E: Tensor, is_transposed: bool
) -> Tensor:
    """`product + scale * (rows @ a[e]^T) @ b[e]^T`, by torch's grouped product; the product itself without an adapter.

    Args:
        product_RN: of the same rows with the weight.
        rows_RK: sorted by expert.
        ends_E: int32, the end of each expert's rows.
    """
    if adapter is None:
        return product_RN
    a_ErK, b_ENr = (adapter.padded() if rows_RK.is_cuda else adapter).factors(is_transposed)
    inner_Rr = grouped_product(rows_RK, a_ErK.transpose(1, 2), ends_E) * adapter.scale
    return product_RN + grouped_product(inner_Rr, b_ENr.transpose(1, 2), ends_E)
