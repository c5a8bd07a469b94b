"""Sums over a token's rows, written where the token's rank will read them: nothing is kept here and nothing copied.

    with offered(places):       the exchange says where the ranks' buffers are
        experts                 the Triton experts `take` the offer and `push` their sums, the others leave it
    places.are_filled           which of the two it was

The buffer of a rank with T tokens holds `[n, T, H]` then: what each rank computed for them. On CPUs through the interpreter.

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
from patchgen.kernels.peers.peer_rows import Published, Tokens


@dataclass
class Places:
    """Where sums may go.

    Attributes:
        published: the buffers that the ranks read next; nobody reads them now.
        rank: of this process.
        are_filled: whether the sums were pushed.
    """

    published: Published
    tokens: Tokens
    rank: int
    are_filled: bool = False

    def received(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """`[n, T, H]`: what the ranks pushed here."""
        return self.published.read(self.rank, 0, (self.published.num_ranks, *shape), dtype)


_offer: list[Places] = []


@contextlib.contextmanager
def offered(places: Places | None) -> Iterator[None]:
    """Offers places to the experts that run in this block."""
    if places is not None:
        _offer.append(places)
    try:
        yield
    finally:
        _offer.clear()


def take() -> Places | None:
    """The offer, once."""
    return _offer.pop() if _offer else None


def push(places: Places, rows: Tensor, weights: Tensor, row_of_slot: Tensor, top_k: int) -> None:
    """`combine.sum_slots` of all ranks' tokens, each sum to the rank of its token; a token without a slot here has none."""
    places.are_filled = True
    hidden_size, tokens = rows.shape[1], places.tokens
    if not tokens.total:
        return
    block = min(triton.next_power_of_2(hidden_size), 1024)
    _push[(max(tokens.counts) * places.published.num_ranks, triton.cdiv(hidden_size, block))](
        rows,
        weights,
        row_of_slot,
        places.published.addresses,
        tokens.starts,
        H=hidden_size,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_H=block,
        RANK=places.rank,
        RANKS=places.published.num_ranks,
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
    # Tokens of all ranks in turn: links and memory are busy at the same time.
    to = tl.program_id(0) % RANKS
    place = (tl.program_id(0) // RANKS).to(tl.int64)
    first = tl.load(starts + to)
    count = tl.load(starts + to + 1) - first
    if place < count:
        token = first + place
        k = tl.arange(0, BLOCK_K)
        slots = tl.load(row_of_slot + token * TOP_K + k, mask=k < TOP_K, other=-1)
        if tl.max(slots, 0) >= 0:
            column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
            total = sum_of_slots(rows, weights, row_of_slot, token, column, H, TOP_K, BLOCK_H)
            item: tl.constexpr = rows.dtype.element_ty
            size: tl.constexpr = item.primitive_bitwidth // 8
            there = tl.load(addresses + to) + (RANK * count + place) * (H * size)
            target = tl.multiple_of(there.to(tl.pointer_type(item)), ALIGNMENT)
            tl.store(target + column, total.to(item), mask=column < H)


def add_up(places: Places, index: Tensor, experts_per_rank: int, like: Tensor) -> Tensor:
    """`[T, H]` of this rank: the sum over ranks of what each pushed, as `peer_rows.sum_rows` adds up what each published.

    Args:
        index: `[T, K]`, the model's experts. What ranks that own none of a token's experts would have pushed is not read.
        like: its columns and dtype are those of the result.
    """
    out = like.new_empty(index.shape[0], like.shape[1])
    if not out.is_cuda:
        received = places.received(out.shape, out.dtype)
        owner = index.div(experts_per_rank, rounding_mode="floor")
        wide = out.new_zeros(out.shape, dtype=torch.promote_types(out.dtype, torch.float32))
        for source, computed in enumerate(received):
            wide += torch.where((owner == source).any(dim=1, keepdim=True), computed, 0)
        return out.copy_(wide)
    launch_add_up(places, index, experts_per_rank, out)
    return out


def launch_add_up(places: Places, index: Tensor, experts_per_rank: int, out: Tensor) -> None:
    """The kernel of `add_up`, into its result."""
    if out.numel():
        block = min(triton.next_power_of_2(out.shape[1]), 2048)
        _add_up_received[(out.shape[0], triton.cdiv(out.shape[1], block))](
            places.received(out.shape, out.dtype),
            index,
            out,
            out.shape[0],
            experts_per_rank,
            H=out.shape[1],
            TOP_K=index.shape[1],
            BLOCK_K=triton.next_power_of_2(index.shape[1]),
            BLOCK_H=block,
            RANKS=places.published.num_ranks,
            num_warps=max(1, block // 512),
        )


@triton.jit(do_not_specialize=["num_tokens", "experts_per_rank"])
def _add_up_received(
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
    k = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    owner = tl.load(index + token * TOP_K + k, mask=k < TOP_K, other=RANKS * experts_per_rank) // experts_per_rank
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        asked = tl.max((owner == rank).to(tl.int32), 0) > 0
        source = received + (token + rank * num_tokens.to(tl.int64)) * H
        total += tl.load(source + column, mask=(column < H) & asked, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)
