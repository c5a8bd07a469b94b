"""What adapters add to the experts that run now: said by the module around them, taken where the seam is called.

    wrapper(experts)                 with adding(experts, "gate_up_proj", factors): experts(...)
      generated experts              ops.fused_moe(..., self.gate_up_proj, self.down_proj, ...)
        ops.fused_moe                taken_by(gate_up_proj, down_proj)    -> kernels.moe_adapters.ExpertAdapters

Generated code hands its parameters to the seam as they are, so a parameter says itself which of the two it is. An adapter
that no call took is an error: what was meant to be trained would do nothing.
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
class Added:
    """What is added to one parameter: `low_rank` to `owner.name`; whether a call took it."""

    owner: nn.Module
    name: str
    low_rank: LowRank
    taken: bool = False

    def is_for(self, weight: Tensor) -> bool:
        return getattr(self.owner, self.name) is weight


_ADDED: list[Added] = []


def are_adding() -> bool:
    """Whether the experts that run now have adapters: the seam serves them, whatever is selected."""
    return bool(_ADDED)


@contextlib.contextmanager
def adding(owner: nn.Module, name: str, low_rank: LowRank) -> Iterator[None]:
    """Adds `low_rank` to the parameter `owner.name` in the calls of the seam inside the block.

    Raises:
        RuntimeError: no call took that parameter.
    """
    added = Added(owner, name, low_rank)
    _ADDED.append(added)
    try:
        yield
    finally:
        _ADDED.pop()
    if not added.taken:
        raise RuntimeError(
            f"The adapter of {type(owner).__name__}.{name} was not used: its forward does not hand that parameter to "
            "ops.fused_moe as it is. Take it out of lora.target_parameters."
        )


def taken_by(gate_up_proj: Tensor, down_proj: Tensor) -> ExpertAdapters | None:
    """The adapters of a call with these weights; None: they have none."""
    if not _ADDED:
        return None
    from patchgen.kernels.moe.adapters import ExpertAdapters

    found = []
    for weight in (gate_up_proj, down_proj):
        mine = next((added for added in _ADDED if added.is_for(weight)), None)
        if mine is not None:
            mine.taken = True
        found.append(None if mine is None else mine.low_rank.to(weight.dtype))
    return ExpertAdapters(*found)
