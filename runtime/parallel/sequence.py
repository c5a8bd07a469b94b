"""Ulysses: each rank has a slice of the sequence, exchanged for a slice of the heads where the full sequence is needed.

B batch   S full sequence   s this rank's slice (S / n)   n ranks   N heads   D head size

        before                     exchange                  attention
rank 0  (B, s, N, D) first slice   ----------->   (B, S, N/n, D) first heads
rank 1  (B, s, N, D) second slice  ----------->   (B, S, N/n, D) second heads

For attention whose heads n does not divide see `gathered_keys.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from patchgen.runtime import mask_functions
from patchgen.runtime.parallel.collectives import start_all_to_all
from patchgen.runtime.parallel.state import ParallelState


def scatter_heads(tensors: Sequence[Tensor], state: ParallelState, *, operation: str) -> list[Tensor]:
    """All tensors from `(B, s, N_i, D_i)` to `(B, S, N_i/n, D_i)` in one exchange per dtype.

    Args:
        tensors: each `(B, s, N_i, D_i)` with `N_i` divisible by n.
    """
    return start_scatter_heads(tensors, state, operation=operation)()


def start_scatter_heads(
    tensors: Sequence[Tensor], state: ParallelState, *, operation: str
) -> Callable[[], list[Tensor]]:
    """Starts `scatter_heads`; the returned function waits and returns the tensors."""
    size = state.sp
    shapes = [tensor.shape for tensor in tensors]
    started = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        parts = []
        for index in indices:
            B, s, N, D = shapes[index]
            parts.append(tensors[index].reshape(B, s, size, N // size * D))
        widths = [part.shape[-1] for part in parts]
        packed_BsnF = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        wait = start_all_to_all(packed_BsnF.permute(2, 0, 1, 3), state.sp_group, operation=operation)
        started.append((indices, widths, wait))

    def finish() -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for indices, widths, wait in started:
            gathered_BSF = wait().permute(1, 0, 2, 3).flatten(1, 2)
            for index, part in zip(indices, gathered_BSF.split(widths, dim=-1), strict=True):
                N, D = shapes[index][2:]
                results[index] = part.unflatten(-1, (N // size, D))
        return [results[index] for index in range(len(shapes))]

    return finish


def gather_heads(tensor: Tensor, state: ParallelState, *, operation: str) -> Tensor:
    """`(B, S, N/n, D)` back to `(B, s, N, D)`."""
    return start_gather_heads(tensor, state, operation=operation)().flatten(2, 3)


def start_gather_heads(tensor: Tensor, state: ParallelState, *, operation: str) -> Callable[[], Tensor]:
    """Starts `gather_heads`; the returned function waits and returns `(B, s, n, N/n, D)`, by owning rank."""
    size = state.sp
    B, S, heads, D = tensor.shape
    by_slice_nBsF = tensor.reshape(B, size, S // size, heads * D).permute(1, 0, 2, 3)
    wait = start_all_to_all(by_slice_nBsF, state.sp_group, operation=operation)
    return lambda: wait().permute(1, 2, 0, 3).unflatten(-1, (heads, D))


def attend_over_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    state: ParallelState,
    *,
    where: str,
) -> Tensor:
    """Attention over the full sequence, of which this rank has a slice.

    With `state.head_groups` g > 1 the heads are exchanged in g groups: the attention of one group runs while the next
    group arrives and the previous one returns; in the backward too.

        heads of group 0   exchange | attention | return
        heads of group 1            | exchange  | attention | return

    Args:
        q: `(B, s, N_q, D)`.
        k, v: `(B, s, N_k, D)`, `(B, s, N_k, D_v)`; key heads are repeated only as far as needed.
        sinks: None, or `(N_q,)`.
        attend: `(q, k, v, sinks) -> out` over the full sequence and some heads, `(B, S, N, ...)`.
        where: the module, for errors and reports of stalls.

    Returns:
        `(B, s, N_q, D_v)`.
    """
    size = state.sp
    groups = num_head_groups(q.shape[2], k.shape[2], size, state.head_groups)
    repeats = key_value_repeats(q.shape[2], k.shape[2], size, where=where)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    grouped = [_in_groups(states, size, groups, dim=2) for states in (q, k, v)]
    local_sinks = [None] * groups if sinks is None else sinks.chunk(size)[state.sp_rank].chunk(groups)
    pending_heads = [
        start_scatter_heads(heads, state, operation=f"exchange q, k and v of {where}")
        for heads in zip(*grouped, strict=True)
    ]

    def attend_to(arrive: Callable[[], list[Tensor]], sink: Tensor | None) -> Tensor:
        q_arrived, k_arrived, v_arrived = arrive()
        return attend(q_arrived, k_arrived, v_arrived, sink)

    returning = [
        start_gather_heads(attend_to(arrive, sink), state, operation=f"return the heads of {where}")
        for arrive, sink in zip(pending_heads, local_sinks, strict=True)
    ]
    by_rank = [wait() for wait in returning]
    return (by_rank[0] if groups == 1 else torch.cat(by_rank, dim=3)).flatten(2, 3)


def num_head_groups(query_heads: int, key_heads: int, size: int, most: int) -> int:
    """The largest number of groups up to `most` that divides a rank's key heads, so that no head is sent twice."""
    key_heads_per_rank = key_heads * key_value_repeats(query_heads, key_heads, size, where="attention") // size
    return max(groups for groups in range(1, most + 1) if key_heads_per_rank % groups == 0)


def _in_groups(heads: Tensor, size: int, groups: int, dim: int) -> list[Tensor]:
    """The heads of each group, `(B, s, N/groups, D)`: the same part of every rank's block of heads."""
    if groups == 1:
        return [heads]
    by_rank = heads.unflatten(dim, (size, groups, heads.shape[dim] // (size * groups)))
    return [part.flatten(dim, dim + 1) for part in by_rank.unbind(dim + 1)]


def key_value_repeats(query_heads: int, key_heads: int, size: int, *, where: str) -> int:
    """The smallest number of repeats of key/value heads with which `size` ranks can divide them.

    Rank r gets query heads `[r * N_q/n, (r+1) * N_q/n)` and key heads `[r * f * N_k/n, ...)` after each key head was
    repeated f times; `f * N_k` must be a multiple of n, and divide `N_q` so that the groups stay aligned.

    Raises:
        ValueError: the number of query heads does not divide by the number of ranks, as it must for recurrences.
    """
    if query_heads % size:
        raise ValueError(
            f"{where} has {query_heads} query heads, which sp={size} does not divide. To fix: choose sp from the divisors of "
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


def counted_positions(
    B: int, s: int, cu_seq_lens: Tensor | None, state: ParallelState | None, *, device: torch.device
) -> Tensor:
    """`(B, s)`: the place of each of this rank's tokens in its row, or with `cu_seq_lens` of full rows in its document."""
    S, start = (s, 0) if state is None else (s * state.sp, s * state.sp_rank)
    if cu_seq_lens is None:
        counted = torch.arange(S, device=device).expand(B, S)
    else:
        counted = mask_functions.positions_within(mask_functions.document_of(cu_seq_lens, B, S))
    return counted.narrow(1, start, s)


def slice_dimension(tensor: Tensor, s: int, state: ParallelState, dim: int) -> Tensor:
    """This rank's slice of a tensor whose `dim` spans the full sequence `s * n`; a slice `s` is returned unchanged.

    Raises:
        ValueError: `dim` has neither length.
    """
    if tensor.shape[dim] == s:
        return tensor
    if tensor.shape[dim] != s * state.sp:
        raise ValueError(
            f"Dimension {dim} of a tensor of shape {tuple(tensor.shape)} spans neither this rank's slice of {s} tokens nor the "
            f"full sequence of {s * state.sp}. To fix: pass the output of batch.slice_batch."
        )
    return tensor.narrow(dim, state.sp_rank * s, s)
