"""Rows read where another rank of the host wrote them: what expert parallelism exchanges through peer memory.

    read_routing    which of each rank's slots are for the experts of this rank, and their weights
    read_tokens     the tokens of all ranks that have such a slot, each once
    sum_rows        what the ranks computed for the tokens of this one, added up in fp32 in the order of the ranks
    read_slots      one value per slot, from the rank that owns the slot's expert

No number comes to the host, and what nobody asked for does not travel: rows of `read_tokens` without a slot here are not
written. On CPUs the same by torch, on memory that the processes share.

    n ranks   T tokens of this rank   N tokens of all ranks   K slots per token   H hidden size   e experts per rank
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_ALIGNMENT = 16  # bytes: what one load takes; a constant of the kernels, which Triton reads when it compiles them


class Published(NamedTuple):
    """Bytes that each rank wrote for the others, as this process sees them.

    Attributes:
        parts: `[B]` uint8 of each rank, the same B; they begin at multiples of 16 bytes.
        addresses: `[n]` int64, where they begin, on the device of the kernels.
    """

    parts: tuple[Tensor, ...]
    addresses: Tensor

    @property
    def num_ranks(self) -> int:
        return len(self.parts)

    def read(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A rank's bytes from `offset` on, as a tensor."""
        length = torch.Size(shape).numel() * dtype.itemsize
        return self.parts[rank][offset : offset + length].view(dtype).view(shape)


class Tokens(NamedTuple):
    """How many tokens each rank has.

    Attributes:
        counts: of each rank, on the host.
        starts: `[n + 1]` int64, the first token of each rank among those of all, on the device.
    """

    counts: tuple[int, ...]
    starts: Tensor

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """`[first, last)` of each rank among the tokens of all."""
        ends = itertools.accumulate(self.counts)
        return [(end - count, end) for end, count in zip(ends, self.counts, strict=True)]


def read_routing(
    published: Published,
    tokens: Tokens,
    top_k: int,
    *,
    index_offset: int,
    weights_offset: int,
    weights_dtype: torch.dtype,
    first_expert: int,
    num_experts: int,
) -> tuple[Tensor, Tensor]:
    """`(index [N, K] int32, weights [N, K])` of all ranks' tokens for the experts of this one.

    Args:
        index_offset, weights_offset: where each rank wrote `[T, K]` int32, the model's experts, and the weights.
        first_expert, num_experts: those of this rank. They become `[0, num_experts)`, all others `num_experts`, which
            marks a slot that is left out.
    """
    shape, device = (tokens.total, top_k), published.addresses.device
    index = torch.empty(shape, dtype=torch.int32, device=device)
    weights = torch.empty(shape, dtype=weights_dtype, device=device)
    if not index.is_cuda:
        for rank, (first, last) in enumerate(tokens.bounds):
            part = (last - first, top_k)
            index[first:last] = published.read(rank, index_offset, part, torch.int32) - first_expert
            weights[first:last] = published.read(rank, weights_offset, part, weights_dtype)
        return index.masked_fill_((index < 0) | (index >= num_experts), num_experts), weights
    launch_read_routing(published, tokens, index, weights, index_offset, weights_offset, first_expert, num_experts)
    return index, weights


def launch_read_routing(
    published: Published,
    tokens: Tokens,
    index: Tensor,
    weights: Tensor,
    index_offset: int,
    weights_offset: int,
    first_expert: int,
    num_experts: int,
) -> None:
    """The kernel of `read_routing`, into its results."""
    if index.numel():
        _read_routing[(triton.cdiv(index.numel(), _BLOCK),)](
            published.addresses,
            tokens.starts,
            index,
            weights,
            tokens.total,
            index_offset,
            weights_offset,
            first_expert,
            num_experts,
            TOP_K=index.shape[1],
            RANKS=published.num_ranks,
            BLOCK=_BLOCK,
        )


@triton.jit(do_not_specialize=["num_tokens", "index_offset", "weights_offset", "first_expert", "num_experts"])
def _read_routing(
    addresses,
    starts,
    index,
    weights,
    num_tokens,
    index_offset,
    weights_offset,
    first_expert,
    num_experts,
    TOP_K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_tokens * TOP_K
    rank = _rank_of(slot // TOP_K, starts, RANKS)
    there = slot - tl.load(starts + rank, mask=inside, other=0) * TOP_K
    address = tl.load(addresses + rank, mask=inside, other=0)
    expert = tl.load((address + index_offset + there * 4).to(tl.pointer_type(tl.int32)), mask=inside, other=0)
    local = expert - first_expert
    tl.store(index + slot, tl.where((local >= 0) & (local < num_experts), local, num_experts), mask=inside)
    item: tl.constexpr = weights.dtype.element_ty
    size: tl.constexpr = item.primitive_bitwidth // 8
    weight = tl.load((address + weights_offset + there * size).to(tl.pointer_type(item)), mask=inside, other=0.0)
    tl.store(weights + slot, weight, mask=inside)


@triton.jit
def _rank_of(token, starts, RANKS: tl.constexpr):
    """The rank that a token of all tokens belongs to: so many ranks after the first start at or before it."""
    rank = token * 0
    for other in tl.static_range(1, RANKS):
        rank += (token >= tl.load(starts + other)).to(rank.dtype)
    return rank


def read_tokens(
    published: Published, tokens: Tokens, index: Tensor | None, num_experts: int, hidden_size: int, dtype: torch.dtype
) -> Tensor:
    """`[N, H]`: all ranks' tokens; those without a slot here hold anything.

    Args:
        published: each rank's `[T, H]` in `dtype`, at its beginning.
        index: `[N, K]` as `read_routing` returns it, `num_experts` in a slot that is left out; None: every token is read.
    """
    rows = torch.empty(tokens.total, hidden_size, dtype=dtype, device=published.addresses.device)
    if not rows.is_cuda:
        every = torch.ones(tokens.total, dtype=torch.bool)
        wanted = every if index is None else (index < num_experts).any(dim=1)
        for rank, (first, last) in enumerate(tokens.bounds):
            own = wanted[first:last]
            rows[first:last][own] = published.read(rank, 0, (last - first, hidden_size), dtype)[own]
        return rows
    launch_read_tokens(published, tokens, index, num_experts, rows)
    return rows


def launch_read_tokens(
    published: Published, tokens: Tokens, index: Tensor | None, num_experts: int, rows: Tensor
) -> None:
    """The kernel of `read_tokens`, into its result."""
    if rows.numel():
        block = _columns(rows.shape[1])
        top_k = 1 if index is None else index.shape[1]
        _read_tokens[(rows.shape[0], triton.cdiv(rows.shape[1], block))](
            published.addresses,
            tokens.starts,
            index,
            rows,
            num_experts,
            H=rows.shape[1],
            TOP_K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k),
            BLOCK_H=block,
            RANKS=published.num_ranks,
            ALIGNMENT=alignment(rows),
            num_warps=_warps(block),
        )


@triton.jit(do_not_specialize=["num_experts"])
def _read_tokens(
    addresses,
    starts,
    index,
    rows,
    num_experts,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RANKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    wanted = True
    if index is not None:
        k = tl.arange(0, BLOCK_K)
        wanted = tl.min(tl.load(index + token * TOP_K + k, mask=k < TOP_K, other=num_experts), 0) < num_experts
    if wanted:
        item: tl.constexpr = rows.dtype.element_ty
        size: tl.constexpr = item.primitive_bitwidth // 8
        rank = _rank_of(token, starts, RANKS)
        there = tl.load(addresses + rank) + (token - tl.load(starts + rank)) * (H * size)
        column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        source = tl.multiple_of(there.to(tl.pointer_type(item)), ALIGNMENT)
        value = tl.load(source + column, mask=column < H)
        tl.store(rows + token * H + column, value, mask=column < H)


def sum_rows(
    published: Published, tokens: Tokens, rank: int, index: Tensor, experts_per_rank: int, like: Tensor
) -> Tensor:
    """`[T, H]` of rank `rank`: the sum over ranks of what each computed for its tokens, in fp32, rounded once.

    Args:
        published: each rank's `[N, H]` in the dtype of `like`, at its beginning.
        index: `[T, K]`, the model's experts. Ranks that own none of a token's experts are not asked.
        like: its columns and dtype are those of the result.
    """
    out = like.new_empty(index.shape[0], like.shape[1])
    if not out.is_cuda:
        first, last = tokens.bounds[rank]
        wide = out.new_zeros(out.shape, dtype=torch.promote_types(out.dtype, torch.float32))
        owner = index.div(experts_per_rank, rounding_mode="floor")
        for source in range(published.num_ranks):
            computed = published.read(source, 0, (tokens.total, out.shape[1]), out.dtype)[first:last]
            wide += torch.where((owner == source).any(dim=1, keepdim=True), computed, 0)
        return out.copy_(wide)
    launch_sum_rows(published, tokens, rank, index, experts_per_rank, out)
    return out


def launch_sum_rows(
    published: Published, tokens: Tokens, rank: int, index: Tensor, experts_per_rank: int, out: Tensor
) -> None:
    """The kernel of `sum_rows`, into its result."""
    if out.numel():
        block = _columns(out.shape[1])
        _sum_rows[(out.shape[0], triton.cdiv(out.shape[1], block))](
            published.addresses,
            index,
            out,
            tokens.bounds[rank][0],
            experts_per_rank,
            H=out.shape[1],
            TOP_K=index.shape[1],
            BLOCK_K=triton.next_power_of_2(index.shape[1]),
            BLOCK_H=block,
            RANKS=published.num_ranks,
            ALIGNMENT=alignment(out),
            num_warps=_warps(block),
        )


@triton.jit(do_not_specialize=["first_token", "experts_per_rank"])
def _sum_rows(
    addresses,
    index,
    out,
    first_token,
    experts_per_rank,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RANKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    item: tl.constexpr = out.dtype.element_ty
    size: tl.constexpr = item.primitive_bitwidth // 8
    owner = tl.load(index + token * TOP_K + k, mask=k < TOP_K, other=RANKS * experts_per_rank) // experts_per_rank
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        asked = tl.max((owner == rank).to(tl.int32), 0) > 0
        there = tl.load(addresses + rank) + (token + first_token) * (H * size)
        source = tl.multiple_of(there.to(tl.pointer_type(item)), ALIGNMENT)
        total += tl.load(source + column, mask=(column < H) & asked, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(item), mask=column < H)


def read_slots(
    published: Published,
    tokens: Tokens,
    rank: int,
    index: Tensor,
    experts_per_rank: int,
    offset: int,
    dtype: torch.dtype,
) -> Tensor:
    """`[T, K]` of rank `rank`: each slot's value from the rank that owns its expert; 0 for one that is left out.

    Args:
        published: each rank's `[N, K]` in `dtype`, from `offset` on.
        index: `[T, K]`, the model's experts.
    """
    out = torch.empty(index.shape, dtype=dtype, device=index.device)
    if not out.is_cuda:
        first, last = tokens.bounds[rank]
        owner = index.div(experts_per_rank, rounding_mode="floor")
        out.zero_()
        for source in range(published.num_ranks):
            values = published.read(source, offset, (tokens.total, index.shape[1]), dtype)[first:last]
            out = torch.where(owner == source, values, out)
        return out
    launch_read_slots(published, tokens, rank, index, experts_per_rank, offset, out)
    return out


def launch_read_slots(
    published: Published, tokens: Tokens, rank: int, index: Tensor, experts_per_rank: int, offset: int, out: Tensor
) -> None:
    """The kernel of `read_slots`, into its result."""
    if out.numel():
        _read_slots[(triton.cdiv(out.numel(), _BLOCK),)](
            published.addresses,
            index,
            out,
            out.numel(),
            tokens.bounds[rank][0] * out.shape[1],
            experts_per_rank,
            offset,
            RANKS=published.num_ranks,
            BLOCK=_BLOCK,
        )


@triton.jit(do_not_specialize=["num_slots", "first_slot", "experts_per_rank", "offset"])
def _read_slots(
    addresses,
    index,
    out,
    num_slots,
    first_slot,
    experts_per_rank,
    offset,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.load(index + slot, mask=slot < num_slots, other=RANKS * experts_per_rank) // experts_per_rank
    asked = owner < RANKS
    item: tl.constexpr = out.dtype.element_ty
    size: tl.constexpr = item.primitive_bitwidth // 8
    there = tl.load(addresses + owner, mask=asked, other=0) + offset + (slot + first_slot).to(tl.int64) * size
    value = tl.load(there.to(tl.pointer_type(item)), mask=asked, other=0.0)
    tl.store(out + slot, value, mask=slot < num_slots)


def _columns(hidden_size: int) -> int:
    return min(triton.next_power_of_2(hidden_size), 2048)


def _warps(block: int) -> int:
    return max(1, block // 512)


def alignment(rows: Tensor) -> int:
    """The elements of a row that one load takes: rows begin at multiples of 16 bytes if their length is one."""
    size = rows.element_size()
    return _ALIGNMENT if rows.shape[1] * size % _ALIGNMENT == 0 else size
