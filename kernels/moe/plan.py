"""Which rows go to which expert, and which tiles cover them, without any count on the host.

The (token, slot) pairs are sorted by expert; sorted pairs are called rows. Every kernel works on tiles of `BLOCK_M`
rows of one expert:

    rows      | expert 0: 300 rows          | expert 1: 20 | expert 2: 0 | expert 3: 130        |left out|
    tiles     | 0: 128 | 1: 128 | 2: 44     | 3: 20        |             | 4: 128 | 5: 2        |
    padded    | 0..127 | 128..  | 256..383  | 384..511     |             | 512..  | 640..767    |

The kernels with an epilogue compute an expert's last tile with half the rows where those hold what is left.

A tensor over rows is *compact* (consecutive rows) or *padded* (each tile has `BLOCK_M` rows, so tile `i` starts at
`i * BLOCK_M`). Full tiles are written by TMA, without masks; what is saved for the backward is compact. Where padding rows
are zero, the weight gradients run over full blocks of rows.

    T tokens   K slots per token   R = T * K rows   E experts   M tiles, at most R / BLOCK_M + E
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK_M = 128
"""Rows per tile in every kernel: one tile table serves all of them."""

VARYING = ("num_tokens", "num_rows", "num_tiles")
"""Kernel arguments that vary between calls, under expert parallelism on each rank and step. Triton would otherwise recompile
a kernel for values divisible by 16, in the middle of training."""

_ROWS_PER_PROGRAM = 1024


class Plan(NamedTuple):
    """The routing of one call, all int32, all on the device.

    Attributes:
        padded_of_slot: `[R]`, the padded row of each slot `token * K + k`; -1 for one that is left out.
        slot_of_padded: `[M * BLOCK_M]`, the slot of each padded row; padding rows repeat the last row of their expert.
        row_start: `[E + 1]`, the first compact row of each expert.
        tile_start: `[E + 1]`, the first tile of each expert; the last entry is the number of tiles.
        tiles: `[3, M]`, for each tile its expert, its first compact row and the end of its expert's rows.
    """

    padded_of_slot: Tensor
    slot_of_padded: Tensor
    row_start: Tensor
    tile_start: Tensor
    tiles: Tensor

    @property
    def num_experts(self) -> int:
        return self.row_start.numel() - 1

    @property
    def num_rows(self) -> int:
        """Slots, those that are left out included."""
        return self.padded_of_slot.numel()

    @property
    def num_padded(self) -> int:
        """Rows of a padded tensor, for any routing."""
        return self.slot_of_padded.numel()


def max_tiles(num_rows: int, num_experts: int) -> int:
    """The most tiles that any routing needs: one partial tile per expert."""
    return min(num_rows, num_rows // BLOCK_M + num_experts)


def empty_plan(num_rows: int, num_experts: int, max_rows: int, device: torch.device) -> Plan:
    """The uninitialised tensors of a plan for `num_rows` slots, at most `max_rows` of them not left out."""
    num_tiles = max_tiles(max_rows, num_experts)
    shapes = ((num_rows,), (num_tiles * BLOCK_M,), (num_experts + 1,), (num_experts + 1,), (3, num_tiles))
    return Plan(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))


def make_plan(top_k_index: Tensor, num_experts: int, max_rows: int | None = None) -> Plan:
    """The plan for `top_k_index [T, K]` with values in `[0, E]`; E marks a slot that is left out.

    Args:
        max_rows: an upper bound of the slots that are not left out, for the number of tiles; None: all.
    """
    num_rows, device = top_k_index.numel(), top_k_index.device
    # One-byte keys sort in one radix pass; the sort is stable, so the rows of an expert are in token order.
    keys = top_k_index.reshape(-1).to(torch.uint8 if num_experts < 256 else torch.int16)
    sorted_keys, order = torch.sort(keys, stable=True)
    plan = empty_plan(num_rows, num_experts, num_rows if max_rows is None else max_rows, device)
    num_tiles = plan.tiles.shape[1]
    _plan_experts[(1,)](
        sorted_keys,
        plan.row_start,
        plan.tile_start,
        num_rows,
        num_experts,
        STEPS=num_rows.bit_length(),
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        BLOCK_M=BLOCK_M,
        num_warps=4,
    )
    _plan_rows[(triton.cdiv(max(num_rows, num_tiles * BLOCK_M), _ROWS_PER_PROGRAM),)](
        order,
        *plan,
        num_rows,
        num_experts,
        num_tiles,
        STEPS=num_experts.bit_length(),
        BLOCK_R=_ROWS_PER_PROGRAM,
        BLOCK_M=BLOCK_M,
        num_warps=4,
    )
    return plan


@triton.jit(do_not_specialize=VARYING)
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
        middle_key = tl.load(sorted_keys + middle, mask=middle < num_rows, other=0).to(tl.int32)
        is_below = (low < high) & (middle_key < key)
        high = tl.where((low < high) & (middle_key >= key), middle, high)
        low = tl.where(is_below, middle + 1, low)
    return low


@triton.jit(do_not_specialize=VARYING)
def _plan_rows(
    order,
    padded_of_slot,
    slot_of_padded,
    row_start,
    tile_start,
    tiles,
    num_rows,
    num_experts,
    num_tiles,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    # One range of numbers serves the compact rows, those that are left out included, and the padded ones.
    index = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    left_out = (index < num_rows) & (index >= tl.load(row_start + num_experts))
    slot = tl.load(order + index, mask=left_out, other=0).to(tl.int32)
    tl.store(padded_of_slot + slot, -1, mask=left_out)

    # The expert of a tile is the last one that starts at or before it.
    tile = index // BLOCK_M
    low = tl.zeros_like(tile)
    high = low + num_experts
    for _ in range(STEPS):
        middle = (low + high) // 2
        starts = tl.load(tile_start + middle + 1, mask=middle < num_experts, other=0)
        starts_before = (low < high) & (starts <= tile)
        high = tl.where((low < high) & (starts > tile), middle, high)
        low = tl.where(starts_before, middle + 1, low)
    is_used = tile < tl.load(tile_start + num_experts)
    end = tl.load(row_start + low + 1, mask=is_used, other=0)
    row = (
        tl.load(row_start + low, mask=is_used, other=0)
        + index
        - tl.load(tile_start + low, mask=is_used, other=0) * BLOCK_M
    )
    slot = tl.load(order + tl.minimum(row, end - 1), mask=is_used, other=0).to(tl.int32)
    tl.store(slot_of_padded + index, slot, mask=tile < num_tiles)
    tl.store(padded_of_slot + slot, index, mask=is_used & (row < end))
    first = is_used & (index % BLOCK_M == 0)
    tl.store(tiles + tile, low, mask=first)
    tl.store(tiles + num_tiles + tile, row, mask=first)
    tl.store(tiles + 2 * num_tiles + tile, end, mask=first)


class LowRankTerm(NamedTuple):
    """A low-rank product that a kernel adds to its tiles before its epilogue, as further depth steps.

    Attributes:
        rows: `[P, r]`: P padded rows, r the rank.
        weight: `[E, N, r]` if `r_is_last`, else `[E, r, N]`, with the N columns of the product.
    """

    rows: Tensor
    weight: Tensor
    r_is_last: bool

    @property
    def rank(self) -> int:
        return self.rows.shape[1]

    @property
    def step(self) -> int:
        """The depth of a step: the rank, rounded up to what products of tiles support, but at most 32.

        Its operands share the shared memory with the four stages of the deepest tile (128 x 256 x 64 in bf16: 192 of a
        Hopper multiprocessor's 227 KiB), which leaves 35: 24 for a depth of 32, where 64 would take 48.
        """
        return min(32, max(16, triton.next_power_of_2(self.rank)))

    def rows_of_tile(self, num_rows: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(self.rows, [num_rows, self.step])

    def columns_of_tile(self, num_columns: int) -> TensorDescriptor:
        box = [1, num_columns, self.step] if self.r_is_last else [1, self.step, num_columns]
        return TensorDescriptor.from_tensor(self.weight.contiguous(), box)


@triton.jit
def tile_at(index, num_m, num_n, GROUP: tl.constexpr):
    """The tile `(m, n)` number `index`, in groups of `GROUP` row tiles, so that what runs at once shares operands."""
    per_group = GROUP * num_n
    group = index // per_group
    first_m = group * GROUP
    size = tl.maximum(tl.minimum(num_m - first_m, GROUP), 1)
    in_group = index - group * per_group
    return first_m + in_group % size, in_group // size


@triton.jit
def describe_tile(index, num_m, num_n, tiles, num_tiles, GROUP: tl.constexpr):
    """`(m, n, expert, first row, end row)` of tile number `index`; past the last tile, of the last one.

    No load depends on another one, so a kernel can prefetch its next tile while it computes one.
    """
    m, n = tile_at(tl.maximum(tl.minimum(index, num_m * num_n - 1), 0), num_m, num_n, GROUP)
    return m, n, tl.load(tiles + m), tl.load(tiles + num_tiles + m), tl.load(tiles + 2 * num_tiles + m)
