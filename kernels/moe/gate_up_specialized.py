"""`gate_up` with warps of their own for the loads, which also finish tiles, in Gluon; see `warp_roles`.

    feeds     load step | load step | load step, finish 8 rows of the tile before | load step, ... 8 more rows | ...
    products  (two groups) multiply a tile; its bf16 values into `staged`; on to the next

The warps that load have time between two steps. In it they finish the tile before, block of rows after block: they read what
the products left in shared memory, write it as h, apply the gate and write a. The warps that multiply only round their
sums and go on, where those of the Triton kernel spend a sixth of a tile at 2048 hidden columns on its epilogue.

    R rows   H hidden size   I expert intermediate size   E experts   W = 2I with a gate, I without
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from patchgen.kernels.elementwise.activations import Activation
from patchgen.kernels.moe.plan import BLOCK_M, VARYING, Plan, describe_tile
from patchgen.kernels.moe.schedule import GATE_UP_SPECIALIZED, num_programs, row_tiles_per_group
from patchgen.kernels.moe.triton_gate import activate, gate_constants, gate_forward
from patchgen.kernels.moe.warp_roles import MULTIPLIERS, descriptor, end_products, multiply_stage, pass_by, stage_after

_ROWS = 8


class KernelConfig(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        halves: 2 where a tile's columns are two ranges of the weight, gate and up; else 1.
        rows: of a block, the part of a tile that is finished at once.
    """

    h: int
    width: int
    top_k: int
    halves: int
    is_gated: bool
    is_transposed: bool
    keep: bool
    group: int
    rows: int = _ROWS
    block_m: int = BLOCK_M
    block_n: int = GATE_UP_SPECIALIZED.n
    block_k: int = GATE_UP_SPECIALIZED.k
    stages: int = GATE_UP_SPECIALIZED.stages


def specialized_gate_up(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    bias: Tensor | None,
    kept: Tensor,
    gated: Tensor,
    plan: Plan,
    top_k: int,
    activation: Activation,
    is_transposed: bool,
    halves: int,
    keep: bool,
) -> None:
    """Fills `kept` and `gated`; the rest as in `gate_up.gate_up`."""
    hidden_size, width = hidden_states.shape[1], gate_up_proj.shape[2 if is_transposed else 1]
    group = row_tiles_per_group(GATE_UP_SPECIALIZED, triton.cdiv(width, GATE_UP_SPECIALIZED.n))
    config = KernelConfig(hidden_size, width, top_k, halves, activation.is_gated, is_transposed, keep, group)
    weight = gate_up_proj.contiguous()
    if is_transposed:
        box = [1, config.block_k, config.block_n]
    else:
        weight = weight.view(plan.num_experts * halves, width // halves, hidden_size)
        box = [halves, config.block_n // halves, config.block_k]
    _specialized_gate_up[(num_programs(hidden_states, GATE_UP_SPECIALIZED.per_sm),)](
        hidden_states,
        descriptor(weight, box),
        bias,
        kept,
        gated,
        plan.slot_of_padded,
        plan.tile_start,
        plan.tiles,
        plan.num_experts,
        plan.tiles.shape[1],
        CONFIG=config,
        num_warps=GATE_UP_SPECIALIZED.warps,
        **gate_constants(activation),
    )


@gluon.jit(do_not_specialize=VARYING)
def _specialized_gate_up(
    x,
    weight,
    bias,
    kept,
    gated,
    slot_of_padded,
    tile_start,
    tiles,
    num_experts,
    num_tiles,
    CONFIG: gl.constexpr,
    GATE_KIND: gl.constexpr,
    GATE_ALPHA: gl.constexpr,
    GATE_LIMIT: gl.constexpr,
    GATE_SHIFT: gl.constexpr,
    GATE_LIMIT_AFTER: gl.constexpr,
):
    STAGES: gl.constexpr = CONFIG.stages
    FEED_WARPS: gl.constexpr = 4
    dtype: gl.constexpr = weight.dtype
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONFIG.block_m, CONFIG.block_k], dtype)
    staged_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, CONFIG.rows, [1, 0])
    box: gl.constexpr = weight.block_shape
    rows = gl.allocate_shared_memory(dtype, [STAGES, CONFIG.block_m, CONFIG.block_k], row_layout)
    columns = gl.allocate_shared_memory(dtype, [STAGES, box[0], box[1], box[2]], weight.layout)
    # Written as halves of a tile, read in blocks of rows: the swizzle repeats with every block.
    staged = gl.allocate_shared_memory(
        dtype, [CONFIG.block_m // CONFIG.rows, CONFIG.rows, CONFIG.block_n], staged_layout
    )
    halves = staged._reinterpret(dtype, [CONFIG.block_m, CONFIG.block_n], staged_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [MULTIPLIERS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [MULTIPLIERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # One arrival announces what TMA copies; each thread that gathers arrives when its pieces are there.
        mbarrier.init(full.index(stage), count=1 + 32 * FEED_WARPS)
        mbarrier.init(empty.index(stage), count=MULTIPLIERS)
    for half in gl.static_range(MULTIPLIERS):
        mbarrier.init(made.index(half), count=1)
        mbarrier.init(taken.index(half), count=1)
    fence_async_shared()
    ring = (rows, columns, full, empty)
    table = (tiles, num_tiles, gl.load(tile_start + num_experts))
    gate: gl.constexpr = (GATE_KIND, GATE_ALPHA, GATE_LIMIT, GATE_SHIFT, GATE_LIMIT_AFTER)
    gl.warp_specialize(
        [
            (_multiply, (bias, halves, ring, made, taken, table, 0, CONFIG)),
            (_multiply, (bias, halves, ring, made, taken, table, 1, CONFIG)),
            (_feed, (x, weight, kept, gated, slot_of_padded, staged, ring, made, taken, table, CONFIG, gate)),
        ],
        [4, FEED_WARPS],
        [168, 168],  # registers per thread: as many for each of the three groups, none of which spills
    )


@gluon.jit
def _multiply(bias, halves, ring, made, taken, table, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    """One half of each tile's rows, by the first or the second group of warps that multiply."""
    HALF: gl.constexpr = CONFIG.block_m // 2
    BLOCK_N: gl.constexpr = CONFIG.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows, columns, full, empty = ring
    result = halves.slice(WHICH * HALF, HALF, dim=0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    taken_phase = gl.to_tensor(1)  # nothing is staged at first
    _, next_n, next_expert, next_first, next_end = _tile(gl.program_id(0), table, CONFIG)
    for index in range(gl.program_id(0), _num_tiles(table, CONFIG), gl.num_programs(0)):
        n, expert, first, end = next_n, next_expert, next_first, next_end
        _, next_n, next_expert, next_first, next_end = _tile(index + gl.num_programs(0), table, CONFIG)
        if first + WHICH * HALF < end:
            acc = gl.zeros([HALF, BLOCK_N], gl.float32, layout)
            for k in range(0, CONFIG.h, CONFIG.block_k):
                mbarrier.wait(full.index(stage), phase)
                fence_async_shared()  # products see what threads wrote, and not TMA, after a fence only
                left = rows.index(stage).slice(WHICH * HALF, HALF, dim=0)
                if CONFIG.is_transposed:
                    right = columns.index(stage).reshape([CONFIG.block_k, CONFIG.block_n])
                else:
                    right = columns.index(stage).reshape([CONFIG.block_n, CONFIG.block_k]).permute([1, 0])
                acc = multiply_stage(left, right, acc, empty, stage, k == 0, CONFIG.stages)
                stage, phase = stage_after(stage, phase, CONFIG.stages)
            acc = end_products(acc, empty, stage, True, CONFIG.stages)
            mbarrier.wait(taken.index(WHICH), taken_phase)
            if bias is None:
                result.store(acc.to(result.dtype))
            else:  # in four pieces, whose biases fit the registers beside the sums
                left, right = _split(acc)
                first_piece, second_piece = _split(left)
                third_piece, fourth_piece = _split(right)
                bias_row = bias + expert * CONFIG.width
                _store_with_bias(result, first_piece, bias_row, n, 0, CONFIG)
                _store_with_bias(result, second_piece, bias_row, n, 1, CONFIG)
                _store_with_bias(result, third_piece, bias_row, n, 2, CONFIG)
                _store_with_bias(result, fourth_piece, bias_row, n, 3, CONFIG)
            mbarrier.arrive(made.index(WHICH))
            taken_phase ^= 1
        else:  # no row of this half is the expert's
            for _k in range(0, CONFIG.h, CONFIG.block_k):
                stage, phase = pass_by(full, empty, stage, phase, CONFIG.stages)


@gluon.jit
def _split(acc):
    """The left and the right columns of a tile; both stay in the registers they are in."""
    return acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _store_with_bias(result, piece, bias, n, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    SIZE: gl.constexpr = CONFIG.block_n // 4
    RANGE: gl.constexpr = CONFIG.width // CONFIG.halves
    offset: gl.constexpr = WHICH * SIZE % (CONFIG.block_n // CONFIG.halves)
    column = (
        n * (CONFIG.block_n // CONFIG.halves)
        + offset
        + gl.arange(0, SIZE, layout=gl.SliceLayout(0, piece.type.layout))
    )
    start: gl.constexpr = WHICH * SIZE // (CONFIG.block_n // CONFIG.halves) * RANGE
    bias_values = gl.load(bias + start + column, mask=column < RANGE, other=0.0).to(gl.float32)
    result.slice(WHICH * SIZE, SIZE, dim=1).store((piece + bias_values[None, :]).to(result.dtype))


@gluon.jit
def _feed(
    x, weight, kept, gated, slot_of_padded, staged, ring, made, taken, table, CONFIG: gl.constexpr, GATE: gl.constexpr
):
    """Loads the steps of one tile after the other and finishes, between them, the tile before."""
    STEPS: gl.constexpr = (CONFIG.h + CONFIG.block_k - 1) // CONFIG.block_k
    BLOCKS: gl.constexpr = CONFIG.block_m // CONFIG.rows
    # Loads of step LEAD overwrite step 0, so its products are done and the tile before is staged: nothing waits for it.
    LEAD: gl.constexpr = CONFIG.stages
    EVERY: gl.constexpr = (STEPS - LEAD) // BLOCKS if STEPS - LEAD > BLOCKS else 1
    rows, columns, full, empty = ring
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    numbers = gl.arange(0, CONFIG.block_m, layout=gl.SliceLayout(1, layout))
    depth = gl.arange(0, CONFIG.block_k, layout=gl.SliceLayout(0, layout))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # every stage is empty at first: the first round through them waits for none
    old_n = gl.to_tensor(0)
    old_first = gl.to_tensor(0)
    old_end = gl.to_tensor(0)
    block = gl.to_tensor(0)
    num_blocks = gl.to_tensor(0)  # no tile is before the first
    phases = (gl.to_tensor(0), gl.to_tensor(0))
    next_m, next_n, next_expert, next_first, next_end = _tile(gl.program_id(0), table, CONFIG)
    next_slot = gl.load(slot_of_padded + next_m * CONFIG.block_m + numbers)
    for index in range(gl.program_id(0), _num_tiles(table, CONFIG), gl.num_programs(0)):
        n, expert, first, end = next_n, next_expert, next_first, next_end
        # Rows past the end repeat the last one: they are computed and not stored.
        pointers = x + (next_slot // CONFIG.top_k).to(gl.int64)[:, None] * CONFIG.h + depth[None, :]
        next_m, next_n, next_expert, next_first, next_end = _tile(index + gl.num_programs(0), table, CONFIG)
        next_slot = gl.load(slot_of_padded + next_m * CONFIG.block_m + numbers)
        for step in range(STEPS):
            k = step * CONFIG.block_k
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, weight.block_type.nbytes)
            if CONFIG.is_transposed:
                corner = [expert, k, n * CONFIG.block_n]
            else:
                corner = [expert * CONFIG.halves, n * (CONFIG.block_n // CONFIG.halves), k]
            tma.async_copy_global_to_shared(weight, corner, ready, columns.index(stage))
            if CONFIG.h % CONFIG.block_k == 0:
                async_copy.async_copy_global_to_shared(rows.index(stage), pointers + k)
            else:
                async_copy.async_copy_global_to_shared(
                    rows.index(stage), pointers + k, mask=(k + depth < CONFIG.h)[None, :]
                )
            async_copy.mbarrier_arrive(ready, increment_count=False)
            stage, phase = stage_after(stage, phase, CONFIG.stages)
            if (step >= LEAD) & (step % EVERY == 0) & (block < num_blocks):
                _finish(kept, gated, staged, made, taken, phases, block, old_n, old_first, old_end, CONFIG, GATE)
                block += 1
        while block < num_blocks:
            _finish(kept, gated, staged, made, taken, phases, block, old_n, old_first, old_end, CONFIG, GATE)
            block += 1
        phases = _after_tile(phases, num_blocks, BLOCKS)
        old_n, old_first, old_end = n, first, end
        block = gl.to_tensor(0)
        num_blocks = gl.where(end - first > CONFIG.block_m // 2, BLOCKS, BLOCKS // 2)
    while block < num_blocks:
        _finish(kept, gated, staged, made, taken, phases, block, old_n, old_first, old_end, CONFIG, GATE)
        block += 1


@gluon.jit
def _after_tile(phases, num_blocks, BLOCKS: gl.constexpr):
    """The phases in which the two halves of the next tile will be staged; a half without rows is not."""
    return gl.where(num_blocks > 0, phases[0] ^ 1, phases[0]), gl.where(num_blocks == BLOCKS, phases[1] ^ 1, phases[1])


@gluon.jit
def _finish(kept, gated, staged, made, taken, phases, block, n, first, end, CONFIG: gl.constexpr, GATE: gl.constexpr):
    """Stores one block of a tile's rows and what the gate makes of it."""
    HALF_BLOCKS: gl.constexpr = CONFIG.block_m // 2 // CONFIG.rows
    SPAN: gl.constexpr = CONFIG.block_n // 2
    mbarrier.wait(made.index(0), phases[0], pred=block == 0)
    mbarrier.wait(made.index(1), phases[1], pred=block == HALF_BLOCKS)
    staged_block = staged.index(block)
    row = first + block * CONFIG.rows
    if CONFIG.halves == 2:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        gate = staged_block.slice(0, SPAN, dim=1).load(layout)
        up = staged_block.slice(SPAN, SPAN, dim=1).load(layout)
        _free(taken, block, HALF_BLOCKS)
        if CONFIG.keep:
            _store(kept, gate, row, end, n * SPAN, CONFIG.width // 2, CONFIG.width, layout)
            _store(kept + CONFIG.width // 2, up, row, end, n * SPAN, CONFIG.width // 2, CONFIG.width, layout)
        out = gate_forward(gate.to(gl.float32), up.to(gl.float32), GATE[0], GATE[1], GATE[2], GATE[3], GATE[4])
        _store(gated, out, row, end, n * SPAN, CONFIG.width // 2, CONFIG.width // 2, layout)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        values = staged_block.load(layout)
        _free(taken, block, HALF_BLOCKS)
        if CONFIG.keep:
            _store(kept, values, row, end, n * CONFIG.block_n, CONFIG.width, CONFIG.width, layout)
        if CONFIG.is_gated:
            half_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
            gate, up = values.reshape([CONFIG.rows, SPAN, 2]).split()
            out = gate_forward(gate.to(gl.float32), up.to(gl.float32), GATE[0], GATE[1], GATE[2], GATE[3], GATE[4])
            out = gl.convert_layout(out, half_layout)  # each thread keeps its values
            _store(gated, out, row, end, n * SPAN, CONFIG.width // 2, CONFIG.width // 2, half_layout)
        else:
            out = activate(values.to(gl.float32), GATE[0], GATE[1])
            _store(gated, out, row, end, n * CONFIG.block_n, CONFIG.width, CONFIG.width, layout)


@gluon.jit
def _free(taken, block, HALF_BLOCKS: gl.constexpr):
    """Says that a half is read, with the last of its blocks."""
    mbarrier.arrive(taken.index(0), pred=block == HALF_BLOCKS - 1)
    mbarrier.arrive(taken.index(1), pred=block == 2 * HALF_BLOCKS - 1)


@gluon.jit
def _store(target, values, first_row, end, first_column, limit, STRIDE: gl.constexpr, layout: gl.constexpr):
    """Stores a block of rows at compact rows from `first_row`, up to row `end` and column `limit`."""
    row = first_row + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, layout))
    mask = (row < end)[:, None] & (column < limit)[None, :]
    pointers = target + row.to(gl.int64)[:, None] * STRIDE + column[None, :]
    gl.store(pointers, values.to(target.dtype.element_ty), mask=mask)


@gluon.jit
def _num_tiles(table, CONFIG: gl.constexpr):
    return table[2] * ((CONFIG.width + CONFIG.block_n - 1) // CONFIG.block_n)


@gluon.jit
def _tile(index, table, CONFIG: gl.constexpr):
    """`describe_tile`, asked for one tile ahead, so that nothing waits for its loads."""
    return describe_tile(
        index, table[2], (CONFIG.width + CONFIG.block_n - 1) // CONFIG.block_n, table[0], table[1], CONFIG.group
    )
