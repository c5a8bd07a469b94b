"""Which rows go to which expert, and which tiles cover them, without the host knowing a single count.

The (token, slot) pairs are sorted by expert; sorted pairs are called rows. Every kernel works on tiles of `BLOCK_M` rows of
one expert:

    rows      | expert 0: 300 rows          | expert 1: 20 | expert 2: 0 | expert 3: 130        |left out|
    tiles     | 0: 128 | 1: 128 | 2: 44     | 3: 20        |             | 4: 128 | 5: 2        |
    padded    | 0..127 | 128..  | 256..383  | 384..511     |             | 512..  | 640..767    |

A tensor over rows is *compact* (row after row) or *padded* (each tile has `BLOCK_M` rows of its own, so tile `i` starts
at `i * BLOCK_M`; the rows without a pair hold zeros). Padded tensors let the weight gradients run over whole blocks of
rows without masks.

    T tokens   K slots per token   R = T * K rows   E experts   M tiles, at most R / BLOCK_M + E
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 128
"""Rows per tile in every kernel: one tile table serves all of them."""

_ROWS_PER_PROGRAM = 1024


class Plan(NamedTuple):
    """The routing of one call, all int32, all on the device.

    Attributes:
        slot_of_row: `[R]`, the flat slot `token * K + k` of each row.
        row_of_slot: `[R]`, its inverse. Rows at or past `row_start[E]` are left out.
        row_start: `[E + 1]`, the first row of each expert.
        tile_start: `[E + 1]`, the first tile of each expert; the last entry is the number of tiles.
        tile_expert: `[M]`, the expert of each tile.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    row_start: Tensor
    tile_start: Tensor
    tile_expert: Tensor


def max_tiles(num_rows: int, num_experts: int) -> int:
    """The most tiles that any routing needs: one partial tile per expert."""
    return min(num_rows, num_rows // BLOCK_M + num_experts)


def make_plan(top_k_index: Tensor, num_experts: int) -> Plan:
    """The plan for `top_k_index [T, K]` with values in `[0, E]`; E marks a slot that is left out."""
    num_rows, device = top_k_index.numel(), top_k_index.device
    # One-byte keys sort in one radix pass; the sort is stable, so the rows of an expert are in token order.
    keys = top_k_index.reshape(-1).to(torch.uint8 if num_experts < 256 else torch.int16)
    sorted_keys, order = torch.sort(keys, stable=True)
    slot_of_row = torch.empty(num_rows, dtype=torch.int32, device=device)
    row_of_slot = torch.empty_like(slot_of_row)
    row_start = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tile_start = torch.empty_like(row_start)
    tile_expert = torch.empty(max_tiles(num_rows, num_experts), dtype=torch.int32, device=device)
    _plan_experts[(1,)](
        sorted_keys,
        row_start,
        tile_start,
        num_rows,
        num_experts,
        STEPS=num_rows.bit_length(),
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        BLOCK_M=BLOCK_M,
        num_warps=4,
    )
    _plan_rows[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM),)](
        order,
        slot_of_row,
        row_of_slot,
        tile_start,
        tile_expert,
        num_rows,
        num_experts,
        tile_expert.numel(),
        STEPS=num_experts.bit_length(),
        BLOCK_R=_ROWS_PER_PROGRAM,
        num_warps=4,
    )
    return Plan(slot_of_row, row_of_slot, row_start, tile_start, tile_expert)


@triton.jit
def _plan_experts(
    sorted_keys,
    row_start,
    tile_start,
    num_rows,
    num_experts,
    STEPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    expert = tl.arange(0, BLOCK_E)
    first = _first_row_not_below(sorted_keys, expert, num_rows, STEPS)
    after = _first_row_not_below(sorted_keys, expert + 1, num_rows, STEPS)
    tiles = tl.where(expert < num_experts, (after - first + BLOCK_M - 1) // BLOCK_M, 0)
    tl.store(row_start + expert, first, mask=expert <= num_experts)
    tl.store(tile_start + expert, tl.cumsum(tiles, 0) - tiles, mask=expert <= num_experts)


@triton.jit
def _first_row_not_below(sorted_keys, key, num_rows, STEPS: tl.constexpr):
    """For each key the first row whose key is not smaller: a binary search in each lane."""
    low = tl.zeros_like(key)
    high = low + num_rows
    for _ in range(STEPS):
        middle = (low + high) // 2
        found = tl.load(sorted_keys + middle, mask=middle < num_rows, other=0).to(tl.int32)
        below = (low < high) & (found < key)
        high = tl.where((low < high) & (found >= key), middle, high)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def _plan_rows(
    order,
    slot_of_row,
    row_of_slot,
    tile_start,
    tile_expert,
    num_rows,
    num_experts,
    num_tiles,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(order + row, mask=row < num_rows, other=0).to(tl.int32)
    tl.store(slot_of_row + row, slot, mask=row < num_rows)
    tl.store(row_of_slot + slot, row, mask=row < num_rows)
    # There are at most as many tiles as rows. The expert of tile `row` is the last one that starts at or before it.
    low = tl.zeros_like(row)
    high = low + num_experts
    for _ in range(STEPS):
        middle = (low + high) // 2
        starts = tl.load(tile_start + middle + 1, mask=middle < num_experts, other=0)
        passed = (low < high) & (starts <= row)
        high = tl.where((low < high) & (starts > row), middle, high)
        low = tl.where(passed, middle + 1, low)
    tl.store(tile_expert + row, low, mask=row < num_tiles)


@triton.jit
def tile_at(index, num_m, num_n, GROUP: tl.constexpr):
    """The tile `(m, n)` number `index`, in groups of `GROUP` row tiles, so that what runs at once shares operands."""
    per_group = GROUP * num_n
    group = index // per_group
    first_m = group * GROUP
    size = tl.minimum(num_m - first_m, GROUP)
    within = index - group * per_group
    return first_m + within % size, within // size


@triton.jit
def rows_of_tile(m, row_start, tile_start, tile_expert, BLOCK_M: tl.constexpr):
    """`(expert, first row, end row)` of tile `m`: compact rows from the first on, valid below the end."""
    expert = tl.load(tile_expert + m)
    first = tl.load(row_start + expert) + (m - tl.load(tile_start + expert)) * BLOCK_M
    return expert, first, tl.load(row_start + expert + 1)
