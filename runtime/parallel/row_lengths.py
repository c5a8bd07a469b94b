"""Rotary embeddings whose frequencies depend on a row's length (longrope, dynamic NTK), on slices of the row.

Transformers takes the length from the largest position id in a forward. A rank's slice has another one than the row, so some
ranks would choose the frequencies of short rows and others those of long ones. Here each rank appends one token at the row's
largest position, and its angles are cut off again:

    row      0 1 2 3 4 5 6 7      length 8
    rank 0   0 1 2 3 [7]          cos, sin  [B, 5, D] -> [B, 4, D]
    rank 1   4 5 6 7 [7]

B rows   s tokens of this rank   D size of a head
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.runtime import parallel
from patchgen.runtime.parallel.collectives import all_reduce

POSITIONS = "position_ids"


def install(model: nn.Module) -> None:
    """Hooks the rotary embeddings of this kind; on one rank, or without sequence parallelism, the hooks do nothing."""
    for module in model.modules():
        if _depends_on_length(module):
            module.register_forward_pre_hook(_append_last_position, with_kwargs=True)
            module.register_forward_hook(_cut_last_position, with_kwargs=True)


def _depends_on_length(module: nn.Module) -> bool:
    """As `dynamic_rope_update` of transformers decides it: by the type of the module, or of each of its kinds of layers."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _append_last_position(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    state = parallel.current()
    if state is None or state.sp == 1:
        return None
    call = inspect.signature(module.forward).bind(*args, **kwargs)
    positions = call.arguments[POSITIONS]  # [B, s], or [axes, B, s]
    largest = all_reduce(
        positions.max(), op=dist.ReduceOp.MAX, group=state.sp_group, operation="find the largest position of a row"
    )
    call.arguments[POSITIONS] = torch.cat([positions, largest.expand(*positions.shape[:-1], 1)], dim=-1)
    return call.args, call.kwargs


def _cut_last_position(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    state = parallel.current()
    if state is None or state.sp == 1:
        return None
    length = inspect.signature(module.forward).bind(*args, **kwargs).arguments[POSITIONS].shape[-1]
    tensors = [output] if isinstance(output, Tensor) else list(output)
    for angles in tensors:
        if angles.ndim < 2 or angles.shape[-2] != length:
            raise ValueError(
                f"{type(module).__name__} returns a tensor of shape {tuple(angles.shape)} for {length} positions; expected "
                f"[..., {length}, D]. Its frequencies depend on the row's length. To fix: train this model with sp=1."
            )
    own = [angles[..., :-1, :] for angles in tensors]
    return own[0] if isinstance(output, Tensor) else type(output)(own)
