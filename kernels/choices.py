"""Which kernel was taken where the choice was left to us: noted for each kind of call, told after the first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Calls:
    """The calls of one kind: how many, and the fewest and most rows that they had."""

    count: int = 0
    fewest: int = 0
    most: int = 0


_TAKEN: dict[tuple[str, str, str], Calls] = {}


def note(seam: str, taken: str, rows: Tensor, weight: Tensor | None = None) -> None:
    """Notes that a call of `seam` took `taken`; not under torch.compile, where one call stands for all that follow.

    Args:
        rows: `(..., H)`, what the call computes with.
        weight: what it computes by, of whose shape there is one for each kind of layer.
    """
    if torch.compiler.is_compiling():
        return
    shape = list(weight.shape if weight is not None else rows.shape[-1:])
    calls = _TAKEN.setdefault((seam, taken, f"{shape} {str(rows.dtype).removeprefix('torch.')}"), Calls())
    number = rows.numel() // max(1, rows.shape[-1])
    calls.fewest = min(calls.fewest, number) if calls.count else number
    calls.most = max(calls.most, number)
    calls.count += 1


def taken(seam: str) -> list[str]:
    """A line for each kind of call of a seam since `forget`: what was taken, for which shape and how many rows."""
    return [
        f"{took} for {kind}, {calls.fewest}{f' to {calls.most}' if calls.most > calls.fewest else ''} rows, "
        f"{calls.count} call{'s' if calls.count > 1 else ''}"
        for (name, took, kind), calls in _TAKEN.items()
        if name == seam
    ]


def forget() -> None:
    """Starts anew."""
    _TAKEN.clear()
