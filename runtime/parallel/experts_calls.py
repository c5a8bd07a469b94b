"""What experts modules are called with, and how many experts they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import torch
from torch import Tensor, nn


class _Experts(Protocol):
    """The attribute that every experts module has."""

    num_experts: int


def num_experts_of(experts: nn.Module) -> int:
    """The number of experts in a module, over all ranks that share them."""
    return cast(_Experts, experts).num_experts


def routing_index(path: str, values: Iterable[object]) -> Tensor | None:
    """The indices `[tokens, experts per token]` among the arguments of experts, whatever signature a wrapper gives their forward:
    hidden states and weights are floating point. None: there are none.

    Raises:
        ValueError: several arguments are integer tensors.
    """
    integer_tensors = [
        v for v in values if isinstance(v, Tensor) and not (v.is_floating_point() or v.dtype == torch.bool)
    ]
    if len(integer_tensors) > 1:
        raise ValueError(
            f"The experts {path} were called with {len(integer_tensors)} integer tensors, of shapes "
            f"{[tuple(v.shape) for v in integer_tensors]}; "
            "expected one, the experts of each token, to count their load. To fix: do not count it (log.expert_load: false)."
        )
    return integer_tensors[0] if integer_tensors else None
