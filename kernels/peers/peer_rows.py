"""Reads rows from the memory of other ranks of the machine: the exchanges of expert parallelism through peer memory.

    read_routing    which of each rank's slots are for the experts of this rank, and their weights
    read_tokens     the tokens of all ranks that have such a slot, each once
    sum_rows        the sum over ranks of what each computed for this rank's tokens, in fp32 and in rank order
    read_slots      one value per slot, from the rank that owns the slot's expert

Nothing is copied to the host, and only needed rows are read: rows of `read_tokens` without a slot here are not written.
On CPUs the same with torch, on memory shared by the processes.

    n ranks   T tokens of this rank   N tokens of all ranks   K slots per token   H hidden size   e experts per rank
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchgen.kernels.peers.published import Published, TokenCounts

_BLOCK = 1024
_ALIGNMENT = 16  # bytes of one load


def read_routing(
    published: Published,
    counts: TokenCounts,
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
        index_offset, weights_offset: byte offsets, in what each rank published, of `[T, K]` int32, the model's experts, and of
            `[T, K]` in `weights_dtype`, the routing weights.
        first_expert, num_experts: the experts of this rank. They become `[0, num_experts)`, all others `num_experts`, which
            marks a slot that is left out.
    """
    shape, device = (counts.total, top_k), published.addresses.device
    index = torch.empty(shape, dtype=torch.int32, device=device)
    weights = torch.empty(shape, dtype=weights_dtype, device=device)
    if not index.is_cuda:
        for rank, (first, last) in enumerate(counts.bounds):
            part = (last - first, top_k)
            index[first:last] = published.read(rank, index_offset, part, torch.int32) - first_expert
            weights[first:last] = published.read(rank, weights_offset, part, weights_dtype)
        return index.masked_fill_((index < 0) | (index >= num_experts), num_experts), weights
    launch_read_routing(published, counts, index, weights, index_offset, weights_offset, first_expert, num_experts)
    return index, weights


def launch_read_routing(
    published: Published,
    counts: TokenCounts,
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
            counts.starts,
            index,
            weights,
            counts.total,
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
    in_bounds = slot < num_tokens * TOP_K
    rank = _rank_of(slot // TOP_K, starts, RANKS)
    there = slot - tl.load(starts + rank, mask=in_bounds, other=0) * TOP_K
    address = tl.load(addresses + rank, mask=in_bounds, other=0)
    expert = tl.load((address + index_offset + there * 4).to(tl.pointer_type(tl.int32)), mask=in_bounds, other=0)
    local = expert - first_expert
    tl.store(index + slot, tl.where((local >= 0) & (local < num_experts), local, num_experts), mask=in_bounds)
    item: tl.constexpr = weights.dtype.element_ty
    size: tl.constexpr = item.primitive_bitwidth // 8
    weight = tl.load((address + weights_offset + there * size).to(tl.pointer_type(item)), mask=in_bounds, other=0.0)
    tl.store(weights + slot, weight, mask=in_bounds)


@triton.jit
def _rank_of(token, starts, RANKS: tl.constexpr):
    """The rank of a token: the number of ranks after the first that start at or before it."""
    rank = token * 0
    for later_rank in tl.static_range(1, RANKS):
        rank += (token >= tl.load(starts + later_rank)).to(rank.dtype)
    return rank


def read_tokens(
    published: Published,
    counts: TokenCounts,
    index: Tensor | None,
    num_experts: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """`[N, H]`: all ranks' tokens; rows without a slot here are undefined.

    Args:
        published: each rank's `[T, H]` in `dtype`, at offset 0.
        index: `[N, K]` as `read_routing` returns it, `num_experts` in a slot that is left out; None: every token is read.
    """
    rows = torch.empty(counts.total, hidden_size, dtype=dtype, device=published.addresses.device)
    if not rows.is_cuda:
        needed = torch.ones(counts.total, dtype=torch.bool) if index is None else (index < num_experts).any(dim=1)
        for rank, (first, last) in enumerate(counts.bounds):
            part = needed[first:last]
            rows[first:last][part] = published.read(rank, 0, (last - first, hidden_size), dtype)[part]
        return rows
    launch_read_tokens(published, counts, index, num_experts, rows)
    return rows


def launch_read_tokens(
    published: Published, counts: TokenCounts, index: Tensor | None, num_experts: int, rows: Tensor
) -> None:
    """The kernel of `read_tokens`, into its result."""
    if rows.numel():
        grid, sizes = row_grid(rows, 1 if index is None else index.shape[1])
        _read_tokens[grid](
            published.addresses,
            counts.starts,
            index,
            rows,
            num_experts,
            RANKS=published.num_ranks,
            ALIGNMENT=alignment(rows),
            **sizes,
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
    needed = True
    if index is not None:
        k = tl.arange(0, BLOCK_K)
        needed = tl.min(tl.load(index + token * TOP_K + k, mask=k < TOP_K, other=num_experts), 0) < num_experts
    if needed:
        item: tl.constexpr = rows.dtype.element_ty
        size: tl.constexpr = item.primitive_bitwidth // 8
        rank = _rank_of(token, starts, RANKS)
        there = tl.load(addresses + rank) + (token - tl.load(starts + rank)) * (H * size)
        column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        source = tl.multiple_of(there.to(tl.pointer_type(item)), ALIGNMENT)
        value = tl.load(source + column, mask=column < H)
        tl.store(rows + token * H + column, value, mask=column < H)


def sum_rows(
    published: Published, counts: TokenCounts, rank: int, index: Tensor, experts_per_rank: int, like: Tensor
) -> Tensor:
    """`[T, H]` of rank `rank`: the sum over ranks of what each computed for its tokens, in fp32, rounded once.

    Args:
        published: each rank's `[N, H]` in the dtype of `like`, at offset 0.
        index: `[T, K]`, the model's experts. Ranks that own none of a token's experts are not read.
        like: has the columns and dtype of the result.
    """
    out = like.new_empty(index.shape[0], like.shape[1])
    if not out.is_cuda:
        first, last = counts.bounds[rank]
        shape = (counts.total, out.shape[1])
        ranks = range(published.num_ranks)
        computed = [published.read(source, 0, shape, out.dtype)[first:last] for source in ranks]
        return sum_of_owners(computed, index, experts_per_rank, out)
    launch_sum_rows(published, counts, rank, index, experts_per_rank, out)
    return out


def sum_of_owners(computed: Iterable[Tensor], index: Tensor, experts_per_rank: int, out: Tensor) -> Tensor:
    """Writes the sum of each rank's `[T, H]` over the ranks that own an expert of a token, in fp32, into `out`; by torch."""
    owner = index.div(experts_per_rank, rounding_mode="floor")
    wide = out.new_zeros(out.shape, dtype=torch.promote_types(out.dtype, torch.float32))
    for rank, rows in enumerate(computed):
        wide += torch.where((owner == rank).any(dim=1, keepdim=True), rows, 0)
    return out.copy_(wide)


def launch_sum_rows(
    published: Published, counts: TokenCounts, rank: int, index: Tensor, experts_per_rank: int, out: Tensor
) -> None:
    """The kernel of `sum_rows`, into its result."""
    if out.numel():
        grid, sizes = row_grid(out, index.shape[1])
        _sum_rows[grid](
            published.addresses,
            index,
            out,
            counts.bounds[rank][0],
            experts_per_rank,
            RANKS=published.num_ranks,
            ALIGNMENT=alignment(out),
            **sizes,
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
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    item: tl.constexpr = out.dtype.element_ty
    size: tl.constexpr = item.primitive_bitwidth // 8
    owner = owner_of_slots(index, token, experts_per_rank, TOP_K, BLOCK_K, RANKS)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        is_owner = tl.max((owner == rank).to(tl.int32), 0) > 0
        there = tl.load(addresses + rank) + (token + first_token) * (H * size)
        source = tl.multiple_of(there.to(tl.pointer_type(item)), ALIGNMENT)
        total += tl.load(source + column, mask=(column < H) & is_owner, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(item), mask=column < H)


@triton.jit
def owner_of_slots(index, token, experts_per_rank, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, RANKS: tl.constexpr):
    """The rank that owns the expert of each slot of a token; `RANKS` for slots that are left out."""
    k = tl.arange(0, BLOCK_K)
    return tl.load(index + token * TOP_K + k, mask=k < TOP_K, other=RANKS * experts_per_rank) // experts_per_rank


def read_slots(
    published: Published,
    counts: TokenCounts,
    rank: int,
    index: Tensor,
    experts_per_rank: int,
    offset: int,
    dtype: torch.dtype,
) -> Tensor:
    """`[T, K]` of rank `rank`: each slot's value from the rank that owns its expert; 0 if it is left out.

    Args:
        published: each rank's `[N, K]` in `dtype`, at byte `offset`.
        index: `[T, K]`, the model's experts.
    """
    out = torch.empty(index.shape, dtype=dtype, device=index.device)
    if not out.is_cuda:
        first, last = counts.bounds[rank]
        owner = index.div(experts_per_rank, rounding_mode="floor")
        out.zero_()
        for source in range(published.num_ranks):
            values = published.read(source, offset, (counts.total, index.shape[1]), dtype)[first:last]
            out = torch.where(owner == source, values, out)
        return out
    launch_read_slots(published, counts, rank, index, experts_per_rank, offset, out)
    return out


def launch_read_slots(
    published: Published,
    counts: TokenCounts,
    rank: int,
    index: Tensor,
    experts_per_rank: int,
    offset: int,
    out: Tensor,
) -> None:
    """The kernel of `read_slots`, into its result."""
    if out.numel():
        _read_slots[(triton.cdiv(out.numel(), _BLOCK),)](
            published.addresses,
            index,
            out,
            out.numel(),
            counts.bounds[rank][0] * out.shape[1],
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
    is_owned = owner < RANKS
    item: tl.constexpr = out.dtype.element_ty
    size: tl.constexpr = item.primitive_bitwidth // 8
    there = tl.load(addresses + owner, mask=is_owned, other=0) + offset + (slot + first_slot).to(tl.int64) * size
    value = tl.load(there.to(tl.pointer_type(item)), mask=is_owned, other=0.0)
    tl.store(out + slot, value, mask=slot < num_slots)


def row_grid(rows: Tensor, top_k: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of a kernel over `rows [T, H]`, a program per row and block of columns, and its other arguments."""
    block = min(triton.next_power_of_2(rows.shape[1]), 2048)
    sizes = {"H": rows.shape[1], "TOP_K": top_k, "BLOCK_K": triton.next_power_of_2(top_k), "BLOCK_H": block}
    return (rows.shape[0], triton.cdiv(rows.shape[1], block)), {**sizes, "num_warps": max(1, block // 512)}


def alignment(rows: Tensor) -> int:
    """The alignment of rows in bytes: 16 if the length of a row is a multiple of that, else one element."""
    size = rows.element_size()
    return _ALIGNMENT if rows.shape[1] * size % _ALIGNMENT == 0 else size
