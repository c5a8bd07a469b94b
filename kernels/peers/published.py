"""What the ranks of one machine read from each other; without kernels, so that it is imported where Triton is missing, too.

n ranks   B bytes that a rank publishes
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


class Published(NamedTuple):
    """Bytes that each rank wrote for the others, mapped into this process.

    Attributes:
        parts: `[B]` uint8 of each rank, aligned to 16 bytes.
        addresses: `[n]` int64, the address of each part, on the device of the kernels.
    """

    parts: tuple[Tensor, ...]
    addresses: Tensor

    @property
    def num_ranks(self) -> int:
        return len(self.parts)

    def read(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of a rank's bytes from `offset`."""
        length = torch.Size(shape).numel() * dtype.itemsize
        return self.parts[rank][offset : offset + length].view(dtype).view(shape)


class TokenCounts(NamedTuple):
    """The number of tokens of each rank.

    Attributes:
        per_rank: the numbers, in memory of the CPU.
        starts: `[n + 1]` int64, the index of each rank's first token among those of all, on the device.
    """

    per_rank: tuple[int, ...]
    starts: Tensor

    @property
    def total(self) -> int:
        return sum(self.per_rank)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """`[first, last)` of each rank among the tokens of all."""
        ends = itertools.accumulate(self.per_rank)
        return [(end - count, end) for end, count in zip(ends, self.per_rank, strict=True)]
