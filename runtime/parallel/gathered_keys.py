"""Attention of fewer heads than ranks: each rank gets some heads of a part of the queries, and all keys that these see.

Ulysses (`sequence.py`) goes as far as the query heads: u = gcd(N_q, n) blocks of them. The other factor of n = u g divides the
queries of a block. Queries of a part stay with their rank while keys and values are sent to all g ranks of the block.

    n = 4 ranks, N_q = 2 heads: u = 2, g = 2                       S in 2g chunks     0    1    2    3
    rank 0   head 0, part 0        rank 2   head 1, part 0         part 0            [  ]            [  ]
    rank 1   head 0, part 1        rank 3   head 1, part 1         part 1                 [  ]  [  ]

    before                                    exchange        attention                         return
    (B, s, N_q, D), (B, s, N_k, D)   ----->   queries (B, u s, N_q/u, D), keys (B, S, N_k/u, D)   ----->   (B, s, N_q, D_v)

Part b has chunks b and 2g-1-b: of causal attention, where chunk c sees the c+1 first ones, each part has the same work.

B batch   S full sequence   s this rank's slice (S / n)   n ranks   N heads   D head size
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from patchgen.runtime.parallel.collectives import start_all_to_all
from patchgen.runtime.parallel.sequence import key_value_repeats, start_scatter_heads
from patchgen.runtime.parallel.state import ParallelState

Span = tuple[int, int]
"""Consecutive tokens: the first, and the one after the last."""


def head_blocks(query_heads: int, size: int) -> int:
    """u, the number of blocks into which `size` ranks can divide the query heads; `size` where Ulysses alone does."""
    return math.gcd(query_heads, size)


def attend_over_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, Span], Tensor],
    state: ParallelState,
    *,
    where: str,
) -> Tensor:
    """Attention over the full sequence, of which this rank has a slice, with heads that the ranks do not divide.

    Args:
        q: `(B, s, N_q, D)`.
        k, v: `(B, s, N_k, D)`, `(B, s, N_k, D_v)`; key heads are repeated only as far as u blocks need.
        sinks: None, or `(N_q,)`.
        attend: `(q, k, v, sinks, chunk) -> out` for some heads: the queries of one chunk, all keys and values.
        where: the module, for reports of stalls.

    Returns:
        `(B, s, N_q, D_v)`.
    """
    n, s, N_q = state.sp, q.shape[1], q.shape[2]
    u = head_blocks(N_q, n)
    g = n // u
    block, part = divmod(state.sp_rank, g)
    repeats = key_value_repeats(N_q, k.shape[2], u, where=where)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    # Each block of key heads g times in a row: an exchange of n blocks brings every rank that of its queries.
    k, v = (states.unflatten(2, (u, -1)).repeat_interleave(g, dim=2).flatten(2, 3) for states in (k, v))
    keys_arrive = start_scatter_heads([k, v], state, operation=f"exchange k and v of {where}")

    pieces = [spans_within(chunks_of(other, g, n * s), state.sp_rank, s) for other in range(g)]
    in_order = [span for spans in pieces for span in spans]
    send_sizes = [_num_tokens(spans) for spans in pieces] * u
    receive_sizes = [_num_tokens(spans_within(chunks_of(part, g, n * s), rank, s)) for rank in range(n)]
    by_part_BsND = torch.cat([q[:, first:end] for first, end in in_order], dim=1)
    queries_arrive = start_all_to_all(
        by_part_BsND.unflatten(2, (u, N_q // u)).permute(2, 1, 0, 3, 4).flatten(0, 1),
        state.sp_group,
        operation=f"exchange q of {where}",
        receive_sizes=receive_sizes,
        send_sizes=send_sizes,
    )

    chunks = [(first, end) for first, end in chunks_of(part, g, n * s) if end > first]
    k, v = keys_arrive()
    # Ranks send in the order of the sequence, so the chunks arrive whole, one after the other.
    q_by_chunk = queries_arrive().transpose(0, 1).split([end - first for first, end in chunks], dim=1)
    local_sinks = None if sinks is None else sinks.chunk(u)[block]
    out = [attend(q, k, v, local_sinks, chunk) for q, chunk in zip(q_by_chunk, chunks, strict=True)]

    return_heads = start_all_to_all(
        torch.cat(out, dim=1).transpose(0, 1),
        state.sp_group,
        operation=f"return the heads of {where}",
        receive_sizes=send_sizes,
        send_sizes=receive_sizes,
    )
    returned_BsND = return_heads().unflatten(0, (u, s)).permute(2, 1, 0, 3, 4).flatten(2, 3)
    by_span = dict(zip(in_order, returned_BsND.split([end - first for first, end in in_order], dim=1), strict=True))
    return torch.cat([by_span[span] for span in sorted(in_order)], dim=1)


def chunks_of(part: int, parts: int, S: int) -> list[Span]:
    """The two chunks of a part of the queries, S / parts tokens together; one may be empty."""
    return [(c * S // (2 * parts), (c + 1) * S // (2 * parts)) for c in (part, 2 * parts - 1 - part)]


def spans_within(chunks: list[Span], rank: int, s: int) -> list[Span]:
    """The tokens of some chunks that a rank's slice has, counted from the start of the slice."""
    cut = [(max(first - rank * s, 0), min(end - rank * s, s)) for first, end in chunks]
    return [(first, end) for first, end in cut if first < end]


def _num_tokens(spans: list[Span]) -> int:
    return sum(end - first for first, end in spans)
