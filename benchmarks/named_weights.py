"""Weights that depend only on their names: every layout and every library starts from the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchgen.runtime.checkpoint.placement import shard_like


def weight_of(name: str, shape: Sequence[int], device: str) -> Tensor:
    """The full fp32 weight of that name: ones for a norm (one dimension), else normal with a standard deviation of 0.02."""
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape, device=device).normal_(0, 0.02, generator=generator)


@torch.no_grad()
def place(full: Tensor, parameter: nn.Parameter) -> None:
    """Copies this rank's shard of a full weight into its parameter."""
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(shard_like(full, parameter))
    else:
        parameter.copy_(full)
