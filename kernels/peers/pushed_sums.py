"""Sums over a token's rows, written directly into the buffer of the token's rank, without a local copy.

    with offer(targets):       the exchange offers the ranks' buffers
        experts                the Triton experts without adapters `take_offer` and `push` their sums, others ignore it
    targets.was_pushed         whether the offer was used

The buffer of a rank with T tokens then has `[n, T, H]`: what each rank computed for them. On CPUs through Triton's interpreter.

    n ranks   T tokens of a rank   K slots per token   H hidden size
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchgen.kernels.moe.combine import sum_of_slots
from patchgen.kernels.peers import peer_rows
from patchgen.kernels.peers.peer_rows import owner_of_slots
from patchgen.kernels.peers.published import Published, TokenCounts


@dataclass
class PushTargets:
    """The buffers that sums may be pushed to.

    Attributes:
        published: the buffers that the ranks read next; nothing reads them now.
        rank: of this process.
        was_pushed: whether the sums were pushed.
    """

    published: Published
    counts: TokenCounts
    rank: int
    was_pushed: bool = False

    def received(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """`[n, T, H]`: what the ranks pushed to this one."""
        return self.published.read(self.rank, 0, (self.published.num_ranks, *shape), dtype)


_OFFERED: list[PushTargets] = []


@contextlib.contextmanager
def offer(targets: PushTargets | None) -> Iterator[None]:
    """Offers push targets to the experts that run in this block."""
    if targets is not None:
        _OFFERED.append(targets)
    try:
        yield
    finally:
        _OFFERED.clear()


def take_offer() -> PushTargets | None:
    """The current offer, which is then withdrawn; None without one."""
    return _OFFERED.pop() if _OFFERED else None


def push(targets: PushTargets, rows: Tensor, weights: Tensor, row_of_slot: Tensor, top_k: int) -> None:
    """`combine.sum_slots` of all ranks' tokens, each written to the rank of its token; none for a token without a slot here."""
    targets.was_pushed = True
    hidden_size, counts = rows.shape[1], targets.counts
    if not counts.total:
        return
    block = min(triton.next_power_of_2(hidden_size), 1024)
    _push[(max(counts.per_rank) * targets.published.num_ranks, triton.cdiv(hidden_size, block))](
        rows,
        weights,
        row_of_slot,
        targets.published.addresses,
        counts.starts,
        H=hidden_size,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_H=block,
        RANK=targets.rank,
        RANKS=targets.published.num_ranks,
        ALIGNMENT=peer_rows.alignment(rows),
        num_warps=max(1, block // 256),
    )


@triton.jit
def _push(
    rows,
    weights,
    row_of_slot,
    addresses,
    starts,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    # Tokens of all ranks in turn, so that links and local memory are busy at the same time.
    target_rank = tl.program_id(0) % RANKS
    place = (tl.program_id(0) // RANKS).to(tl.int64)
    first = tl.load(starts + target_rank)
    count = tl.load(starts + target_rank + 1) - first
    if place < count:
        token = first + place
        k = tl.arange(0, BLOCK_K)
        slots = tl.load(row_of_slot + token * TOP_K + k, mask=k < TOP_K, other=-1)
        if tl.max(slots, 0) >= 0:
            column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
            total = sum_of_slots(rows, weights, row_of_slot, token, column, H, TOP_K, BLOCK_H)
            item: tl.constexpr = rows.dtype.element_ty
            size: tl.constexpr = item.primitive_bitwidth // 8
            there = tl.load(addresses + target_rank) + (RANK * count + place) * (H * size)
            target = tl.multiple_of(there.to(tl.pointer_type(item)), ALIGNMENT)
            tl.store(target + column, total.to(item), mask=column < H)


def sum_received(targets: PushTargets, index: Tensor, experts_per_rank: int, like: Tensor) -> Tensor:
    """`[T, H]` of this rank: the sum over ranks of what each pushed, as `peer_rows.sum_rows` sums what each published.

    Args:
        index: `[T, K]`, the model's experts. Ranks that own none of a token's experts pushed nothing for it.
        like: has the columns and dtype of the result.
    """
    out = like.new_empty(index.shape[0], like.shape[1])
    if not out.is_cuda:
        return peer_rows.sum_of_owners(targets.received(out.shape, out.dtype), index, experts_per_rank, out)
    launch_sum_received(targets, index, experts_per_rank, out)
    return out


def launch_sum_received(targets: PushTargets, index: Tensor, experts_per_rank: int, out: Tensor) -> None:
    """The kernel of `sum_received`, into its result."""
    if out.numel():
        grid, sizes = peer_rows.row_grid(out, index.shape[1])
        _sum_received[grid](
            targets.received(out.shape, out.dtype),
            index,
            out,
            out.shape[0],
            experts_per_rank,
            RANKS=targets.published.num_ranks,
            **sizes,
        )


@triton.jit(do_not_specialize=["num_tokens", "experts_per_rank"])
def _sum_received(
    received,
    index,
    out,
    num_tokens,
    experts_per_rank,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RANKS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    owner = owner_of_slots(index, token, experts_per_rank, TOP_K, BLOCK_K, RANKS)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        is_owner = tl.max((owner == rank).to(tl.int32), 0) > 0
        source = received + (token + rank * num_tokens.to(tl.int64)) * H
        total += tl.load(source + column, mask=(column < H) & is_owner, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)
