"""The weight gradients of `grouped_gemm_weights` with warps of their own for the loads, in Gluon; see `warp_roles`.

The first group that multiplies takes columns 0 to 63 of a tile's A side and all of its B side, the second columns 64 to 127.
It adds in the order of the Triton kernel: the same bits. Results leave in pieces of half a tile's columns, so that staging
for them and four stages fill the shared memory. The half of a tile, of either side, that lies past the end of a tensor is
neither multiplied nor stored.

    T tokens   P = M * BLOCK_M padded rows   E experts   A, B columns of the gathered and of the padded side
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from patchgen.kernels.moe.plan import BLOCK_M, Plan, tile_at
from patchgen.kernels.moe.schedule import WEIGHTS_SPECIALIZED, num_programs
from patchgen.kernels.moe.warp_roles import MULTIPLIERS, descriptor, end_products, multiply_stage, pass_by, stage_after

_BLOCK_A = 128


class KernelConfig(NamedTuple):
    """What a kernel is compiled for; `a` and `b` are the columns A and B, `block_r` the rows of a step."""

    a: int
    b: int
    top_k: int
    is_copied: bool
    tokens_first: bool
    tile_rows: int = BLOCK_M
    block_a: int = _BLOCK_A
    block_b: int = WEIGHTS_SPECIALIZED.n
    block_r: int = WEIGHTS_SPECIALIZED.k
    group: int = WEIGHTS_SPECIALIZED.group
    stages: int = WEIGHTS_SPECIALIZED.stages


def specialized_gemm_weights(
    tokens: Tensor, copied: Tensor | None, padded: Tensor, out: Tensor, plan: Plan, top_k: int, tokens_first: bool
) -> None:
    """Fills `out`, `[E, A, B]` or without `tokens_first` `[E, B, A]`; the rest as in `grouped_gemm_weights`."""
    config = KernelConfig(tokens.shape[1], padded.shape[1], top_k, copied is not None, tokens_first)
    half, piece = config.block_a // 2, config.block_b // 2
    _specialized_gemm_weights[(num_programs(tokens, WEIGHTS_SPECIALIZED.per_sm),)](
        tokens if copied is None else descriptor(copied, [config.block_r, config.block_a]),
        descriptor(padded, [config.block_r, config.block_b]),
        descriptor(out, [1, half, piece] if tokens_first else [1, piece, half]),
        plan.slot_of_padded,
        plan.row_start,
        plan.tile_start,
        plan.num_experts,
        plan.num_padded,
        CONFIG=config,
        num_warps=WEIGHTS_SPECIALIZED.warps,
    )


@gluon.jit
def _specialized_gemm_weights(
    tokens, padded, out, slot_of_padded, row_start, tile_start, num_experts, num_padded, CONFIG: gl.constexpr
):
    """Starts the partitions: two that multiply and one that loads. They share a ring of stages: the operands of both
    sides and their barriers. `full` says that a stage's loads are there, `empty` that both groups have multiplied it."""
    gl.static_assert(CONFIG.tile_rows // 2 % CONFIG.block_r == 0)  # an expert's last tile may be half written
    STAGES: gl.constexpr = CONFIG.stages
    LOAD_WARPS: gl.constexpr = 1 if CONFIG.is_copied else 4
    left_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONFIG.block_r, CONFIG.block_a], out.dtype)
    lefts = gl.allocate_shared_memory(out.dtype, [STAGES, CONFIG.block_r, CONFIG.block_a], left_layout)
    rights = gl.allocate_shared_memory(out.dtype, [STAGES, CONFIG.block_r, CONFIG.block_b], padded.layout)
    results = gl.allocate_shared_memory(
        out.dtype, [MULTIPLIERS, 1, out.block_shape[1], out.block_shape[2]], out.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # One arrival announces what TMA copies; each thread that gathers arrives when its pieces are there.
        mbarrier.init(full.index(stage), count=1 if CONFIG.is_copied else 1 + 32 * LOAD_WARPS)
        mbarrier.init(empty.index(stage), count=MULTIPLIERS)
    fence_async_shared()
    ring = (lefts, rights, full, empty)
    num_a: gl.constexpr = (CONFIG.a + CONFIG.block_a - 1) // CONFIG.block_a
    num_b: gl.constexpr = (CONFIG.b + CONFIG.block_b - 1) // CONFIG.block_b
    tiles = (row_start, tile_start, num_experts * (num_a * num_b))
    gl.warp_specialize(
        [
            (_multiply, (out, results, ring, tiles, 0, CONFIG)),
            (_multiply, (out, results, ring, tiles, 1, CONFIG)),
            (_load, (tokens, padded, slot_of_padded, num_padded, ring, tiles, CONFIG)),
        ],
        [4, LOAD_WARPS],
        # Registers per thread, of 168 on average over three times four warps; the first group gets what is left, 232.
        [232, 40],
    )


@gluon.jit
def _load(tokens, padded, slot_of_padded, num_padded, ring, tiles, CONFIG: gl.constexpr):
    """Fills one stage after the other with the steps of one tile after the other."""
    lefts, rights, full, empty = ring
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # every stage is empty at first: the first round through them waits for none
    for index in range(gl.program_id(0), tiles[2], gl.num_programs(0)):
        # Not asked for one tile ahead: the loads are ahead anyway, and a number that a loop carries for the bounds of an
        # inner loop alone is silently taken for dead by Triton 3.6, whose inner loop then keeps the bounds of the first.
        _, a_first, b_first, steps, row = _tile(index, tiles, CONFIG)
        if not CONFIG.is_copied:
            column = a_first + gl.arange(0, CONFIG.block_a, layout=gl.SliceLayout(0, layout))
            if (
                CONFIG.a % CONFIG.block_a != 0
            ):  # past the end: computed, not stored; they read column 0, in 16-byte pieces
                column = gl.max_contiguous(gl.multiple_of(gl.where(column < CONFIG.a, column, 0), 8), 8)
            # Row numbers are read one step ahead of the rows they name; past the expert's rows they only have to exist.
            numbers = row + gl.arange(0, CONFIG.block_r, layout=gl.SliceLayout(1, layout))
            slot = gl.load(slot_of_padded + numbers, mask=numbers < num_padded, other=0)
        for step in range(steps):
            ready = full.index(stage)
            if not CONFIG.is_copied:
                token = slot // CONFIG.top_k
                numbers += CONFIG.block_r
                slot = gl.load(slot_of_padded + numbers, mask=numbers < num_padded, other=0)
            mbarrier.wait(empty.index(stage), phase)
            if CONFIG.is_copied:
                mbarrier.expect(ready, tokens.block_type.nbytes + padded.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    tokens, [row + step * CONFIG.block_r, a_first], ready, lefts.index(stage)
                )
            else:
                mbarrier.expect(ready, padded.block_type.nbytes)
            tma.async_copy_global_to_shared(padded, [row + step * CONFIG.block_r, b_first], ready, rights.index(stage))
            if not CONFIG.is_copied:
                source = tokens + token.to(gl.int64)[:, None] * CONFIG.a + column[None, :]
                async_copy.async_copy_global_to_shared(lefts.index(stage), source)
                async_copy.mbarrier_arrive(ready, increment_count=False)
            stage, phase = stage_after(stage, phase, CONFIG.stages)


@gluon.jit
def _multiply(out, results, ring, tiles, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    """One half of each tile's A columns, by the first or the second group of warps that multiply."""
    HALF: gl.constexpr = CONFIG.block_a // 2
    PIECE: gl.constexpr = CONFIG.block_b // 2
    # Whether the last tile's second half of A columns, or of B columns, lies past the end.
    ENDS_IN_FIRST_HALF: gl.constexpr = (CONFIG.a + HALF - 1) // HALF % 2 == 1
    ENDS_IN_FIRST_PIECE: gl.constexpr = (CONFIG.b + PIECE - 1) // PIECE % 2 == 1
    _, _, full, empty = ring
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    next_expert, next_a, next_b, next_steps, _ = _tile(gl.program_id(0), tiles, CONFIG)
    for index in range(gl.program_id(0), tiles[2], gl.num_programs(0)):
        expert, a_first, b_first, steps = next_expert, next_a + WHICH * HALF, next_b, next_steps
        next_expert, next_a, next_b, next_steps, _ = _tile(index + gl.num_programs(0), tiles, CONFIG)
        tile = (expert, a_first, b_first, steps)
        if WHICH == 1 and ENDS_IN_FIRST_HALF and a_first >= CONFIG.a:
            for _step in range(steps):
                stage, phase = pass_by(full, empty, stage, phase, CONFIG.stages)
        elif ENDS_IN_FIRST_PIECE and b_first + PIECE >= CONFIG.b:
            stage, phase = _compute(out, results, ring, tile, stage, phase, WHICH, PIECE, CONFIG)
        else:
            stage, phase = _compute(out, results, ring, tile, stage, phase, WHICH, CONFIG.block_b, CONFIG)
    tma.store_wait(0)


@gluon.jit
def _compute(out, results, ring, tile, stage, phase, WHICH: gl.constexpr, COLUMNS: gl.constexpr, CONFIG: gl.constexpr):
    """Multiplies and stores the first `COLUMNS` columns of a tile, one piece or two; the stage and phase after it."""
    HALF: gl.constexpr = CONFIG.block_a // 2
    PIECE: gl.constexpr = CONFIG.block_b // 2
    lefts, rights, full, empty = ring
    expert, a_first, b_first, steps = tile
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    acc = gl.zeros([HALF, COLUMNS], gl.float32, layout)
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if not CONFIG.is_copied:
            fence_async_shared()  # products see what threads wrote, and not TMA, after a fence only
        left = lefts.index(stage).slice(WHICH * HALF, HALF, dim=1).permute([1, 0])
        right = rights.index(stage).slice(0, COLUMNS, dim=1)
        acc = multiply_stage(left, right, acc, empty, stage, step == 0, CONFIG.stages)
        stage, phase = stage_after(stage, phase, CONFIG.stages)
    # `steps > 0` is also what keeps `steps` from being taken for dead; see `_load`.
    acc = end_products(acc, empty, stage, steps > 0, CONFIG.stages)
    if COLUMNS == PIECE:
        _store(out, results.index(WHICH), acc, expert, a_first, b_first, CONFIG)
    else:
        first, second = acc.reshape([HALF, 2, PIECE]).permute([0, 2, 1]).split()
        _store(out, results.index(WHICH), first, expert, a_first, b_first, CONFIG)
        _store(out, results.index(WHICH), second, expert, a_first, b_first + PIECE, CONFIG)
    return stage, phase


@gluon.jit
def _store(out, result, piece, expert, a_first, b_first, CONFIG: gl.constexpr):
    """Sends one piece of a tile off; what lies past the end of the tensor, TMA does not write."""
    tma.store_wait(0)  # the piece before has left `result`
    if CONFIG.tokens_first:
        result.reshape([CONFIG.block_a // 2, CONFIG.block_b // 2]).store(piece.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [expert, a_first, b_first], result)
    else:
        result.reshape([CONFIG.block_b // 2, CONFIG.block_a // 2]).permute([1, 0]).store(piece.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [expert, b_first, a_first], result)


@gluon.jit
def _tile(index, tiles, CONFIG: gl.constexpr):
    """`(expert, first A column, first B column, steps, first padded row)` of a tile; past the last tile, of the last.

    The groups that multiply ask for it one tile ahead, so that no product waits for these loads.
    """
    num_a: gl.constexpr = (CONFIG.a + CONFIG.block_a - 1) // CONFIG.block_a
    num_b: gl.constexpr = (CONFIG.b + CONFIG.block_b - 1) // CONFIG.block_b
    row_start, tile_start, total = tiles
    index = gl.minimum(index, total - 1)
    expert = index // (num_a * num_b)
    a_tile, b_tile = tile_at(index % (num_a * num_b), num_a, num_b, CONFIG.group)
    num_rows = gl.load(row_start + expert + 1) - gl.load(row_start + expert)
    row = gl.load(tile_start + expert) * CONFIG.tile_rows
    return (
        expert,
        a_tile * CONFIG.block_a,
        b_tile * CONFIG.block_b,
        (num_rows + CONFIG.block_r - 1) // CONFIG.block_r,
        row,
    )
