"""Which kernel "auto" took, recorded for each kind of call and reported after the first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Calls:
    """The calls of one kind: how many, and their smallest and largest number of rows."""

    count: int = 0
    min_rows: int = 0
    max_rows: int = 0


_CALLS: dict[tuple[str, str, str], Calls] = {}  # (seam, kernel, shape and dtype)


def record(seam: str, kernel: str, rows: Tensor, weight: Tensor | None = None) -> None:
    """Records that a call of `seam` took `kernel`; not under torch.compile, where one trace serves many calls.

    Args:
        rows: `(..., H)`, the input of the call.
        weight: its weight, if any, whose shape is the same for all layers of a kind.
    """
    if torch.compiler.is_compiling():
        return
    shape = list(weight.shape if weight is not None else rows.shape[-1:])
    calls = _CALLS.setdefault((seam, kernel, f"{shape} {str(rows.dtype).removeprefix('torch.')}"), Calls())
    num_rows = rows.numel() // max(1, rows.shape[-1])
    calls.min_rows = min(calls.min_rows, num_rows) if calls.count else num_rows
    calls.max_rows = max(calls.max_rows, num_rows)
    calls.count += 1


def summary(seam: str) -> list[str]:
    """A line for each kind of call of a seam since `reset`: the kernel, the shape and the number of rows."""
    return [
        f"{kernel} for {kind}, {calls.min_rows}{f' to {calls.max_rows}' if calls.max_rows > calls.min_rows else ''} rows, "
        f"{calls.count} call{'s' if calls.count > 1 else ''}"
        for (name, kernel, kind), calls in _CALLS.items()
        if name == seam
    ]


def reset() -> None:
    """Discards what was recorded."""
    _CALLS.clear()
