"""Ulysses: each rank holds a slice of the sequence, and exchanges it for a slice of the heads where all is needed.

B batch   S whole sequence   s this rank's slice (S / n)   n ranks   N heads   D head size

        before                     exchange                  attention
rank 0  (B, s, N, D) first slice   ----------->   (B, S, N/n, D) first heads
rank 1  (B, s, N, D) second slice  ----------->   (B, S, N/n, D) second heads
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from patchgen.runtime.parallel.collectives import all_to_all
from patchgen.runtime.parallel.state import ParallelState


def scatter_heads(tensors: Sequence[Tensor], state: ParallelState, *, operation: str) -> list[Tensor]:
    """All tensors from `(B, s, N_i, D_i)` to `(B, S, N_i/n, D_i)` in one exchange per dtype.

    Args:
        tensors: each `(B, s, N_i, D_i)` with `N_i` divisible by n.
    """
    size = state.sp
    results: list[Tensor | None] = [None] * len(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        parts = []
        for place in places:
            B, s, N, D = tensors[place].shape
            parts.append(tensors[place].reshape(B, s, size, N // size * D))
        widths = [part.shape[-1] for part in parts]
        packed_BsnF = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        received_nBsF = all_to_all(packed_BsnF.permute(2, 0, 1, 3), state.sp_group, operation=operation)
        whole_BSF = received_nBsF.permute(1, 0, 2, 3).flatten(1, 2)
        for place, part in zip(places, whole_BSF.split(widths, dim=-1), strict=True):
            B, s, N, D = tensors[place].shape
            results[place] = part.unflatten(-1, (N // size, D))
    return results


def gather_heads(tensor: Tensor, state: ParallelState, *, operation: str) -> Tensor:
    """`(B, S, N/n, D)` back to `(B, s, N, D)`."""
    size = state.sp
    B, S, heads, D = tensor.shape
    by_slice_nBsF = tensor.reshape(B, size, S // size, heads * D).permute(1, 0, 2, 3)
    received_nBsF = all_to_all(by_slice_nBsF, state.sp_group, operation=operation)
    return received_nBsF.permute(1, 2, 0, 3).reshape(B, S // size, size * heads, D)


def key_value_repeats(query_heads: int, key_heads: int, size: int, *, where: str) -> int:
    """How often key/value heads must be repeated so that `size` ranks can share them: the smallest number that works.

    A rank gets query heads `[r * N_q/n, (r+1) * N_q/n)` and key heads `[r * f * N_k/n, ...)` after each key head was
    repeated f times; `f * N_k` must be a multiple of n, and divide `N_q` so that the groups stay aligned.

    Raises:
        ValueError: the query heads do not divide by the number of ranks.
    """
    if query_heads % size:
        raise ValueError(
            f"{where} has {query_heads} query heads, which sp={size} does not divide. Choose sp from the divisors of "
            f"{query_heads}."
        )
    smallest = size // math.gcd(size, key_heads)
    return next(
        factor
        for factor in range(smallest, query_heads // key_heads + 1)
        if (key_heads * factor) % size == 0 and query_heads % (key_heads * factor) == 0
    )


def position_slice(position_ids: Tensor | None, hidden_states: Tensor, state: ParallelState) -> Tensor:
    """The position ids of this rank's slice; see `ops.sequence_position_ids`."""
    s = hidden_states.shape[1]
    if position_ids is None:
        start = state.sp_rank * s
        return torch.arange(start, start + s, device=hidden_states.device)[None]
    return slice_dimension(position_ids, s, state, dim=-1)


def slice_dimension(tensor: Tensor, s: int, state: ParallelState, dim: int) -> Tensor:
    """This rank's slice of a tensor whose `dim` spans the whole sequence `s * n`; one of another size as it is."""
    if tensor.shape[dim] != s * state.sp:
        return tensor
    return tensor.narrow(dim, state.sp_rank * s, s)
