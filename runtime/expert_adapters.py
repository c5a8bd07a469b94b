"""Passes the adapters of running experts from the module that wraps them to the seam.

    wrapper(experts)                 with applied(experts, "gate_up_proj", factors): experts(...)
      generated experts              ops.fused_moe(..., self.gate_up_proj, self.down_proj, ...)
        ops.fused_moe                adapters_of(gate_up_proj, down_proj)    -> kernels.moe.adapters.ExpertAdapters

Generated code passes its parameters to the seam unchanged, so they identify their adapters. An adapter that no call used is an
error: it would not be trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from patchgen.kernels.moe.adapters import ExpertAdapters, LowRank


@dataclass
class ActiveAdapter:
    """The adapter `low_rank` of the parameter `owner.name`, and whether a call has used it."""

    owner: nn.Module
    name: str
    low_rank: LowRank
    used: bool = False


_ACTIVE: list[ActiveAdapter] = []


def any_active() -> bool:
    """Whether the running experts have adapters, which only the seam supports."""
    return bool(_ACTIVE)


@contextlib.contextmanager
def applied(owner: nn.Module, name: str, low_rank: LowRank) -> Iterator[None]:
    """Applies `low_rank` to the parameter `owner.name` in the seam's calls inside the block.

    Raises:
        RuntimeError: no call used that parameter.
    """
    adapter = ActiveAdapter(owner, name, low_rank)
    _ACTIVE.append(adapter)
    try:
        yield
    finally:
        _ACTIVE.pop()
    if not adapter.used:
        raise RuntimeError(
            f"The adapter of {type(owner).__name__}.{name} was not used: its forward does not pass that parameter to "
            "ops.fused_moe unchanged. Remove it from lora.target_parameters."
        )


def adapters_of(gate_up_proj: Tensor, down_proj: Tensor) -> ExpertAdapters | None:
    """The adapters of a call with these weights; None: no adapter is active."""
    if not _ACTIVE:
        return None
    from patchgen.kernels.moe.adapters import ExpertAdapters

    low_ranks = []
    for weight in (gate_up_proj, down_proj):
        adapter = next((active for active in _ACTIVE if getattr(active.owner, active.name) is weight), None)
        if adapter is not None:
            adapter.used = True
        low_ranks.append(None if adapter is None else adapter.low_rank.to(weight.dtype))
    return ExpertAdapters(*low_ranks)
