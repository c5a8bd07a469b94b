"""The weight gradients from rows in order, with one pipeline of loads through all tiles of a program, in Gluon.

Same product, same order of additions and so the same bits as `grouped_gemm_weights`, which Triton schedules: there each
tile ends its pipeline and fills it again, every 16 steps at 1024 rows per expert. Here the loads run ahead over the
ends of tiles, so that the first steps of a tile are in shared memory when the last product of the tile before is done.
Triton cannot be told so, for it does not merge loops over a number of steps that varies (README.md beside this).

Gluon is an experimental language whose interface changes from release to release: it serves the releases of Triton in
which these kernels were run, on the one architecture with `wgmma`, and nothing else.

    P = M * BLOCK_M padded rows   E experts   A, B columns of the two sides
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from patchgen.kernels.moe_plan import BLOCK_M, Plan
from patchgen.kernels.moe_schedule import WEIGHTS, num_programs

_BLOCK_A = 128


def pipelined_gemm_weights(copied: Tensor, padded: Tensor, plan: Plan, tokens_first: bool) -> Tensor:
    """`[E, A, B]`, or `[E, B, A]` unless `tokens_first`, from `copied [P, A]` and `padded [P, B]`; see
    `grouped_gemm_weights`. Experts without rows get zeros."""
    num_experts = plan.num_experts
    gathered_size, padded_size = copied.shape[1], padded.shape[1]
    shape = (gathered_size, padded_size) if tokens_first else (padded_size, gathered_size)
    out = torch.empty(num_experts, *shape, dtype=copied.dtype, device=copied.device)
    blocks = WEIGHTS
    _pipelined_gemm_weights[(num_programs(copied, blocks.per_sm),)](
        _descriptor(copied, [blocks.k, _BLOCK_A]),
        _descriptor(padded, [blocks.k, blocks.n]),
        _descriptor(out, [1, _BLOCK_A, blocks.n] if tokens_first else [1, blocks.n, _BLOCK_A]),
        plan.row_start,
        plan.tile_start,
        num_experts,
        A=gathered_size,
        B=padded_size,
        TOKENS_FIRST=tokens_first,
        TILE_ROWS=BLOCK_M,
        BLOCK_A=_BLOCK_A,
        BLOCK_B=blocks.n,
        BLOCK_R=blocks.k,
        GROUP=blocks.group,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
    )
    return out


def _descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[tensor.dtype]
    return TensorDescriptor.from_tensor(tensor, box, gl.NVMMASharedLayout.get_default_for(box, dtype))


@gluon.jit
def _pipelined_gemm_weights(
    tokens,
    padded,
    out,
    row_start,
    tile_start,
    num_experts,
    A: gl.constexpr,
    B: gl.constexpr,
    TOKENS_FIRST: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    BLOCK_A: gl.constexpr,
    BLOCK_B: gl.constexpr,
    BLOCK_R: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    num_a: gl.constexpr = (A + BLOCK_A - 1) // BLOCK_A
    num_b: gl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    gl.static_assert(TILE_ROWS // 2 % BLOCK_R == 0)  # an expert's last tile may be half written
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_B, 16])
    lefts = gl.allocate_shared_memory(out.dtype, [STAGES, BLOCK_R, BLOCK_A], tokens.layout)
    rights = gl.allocate_shared_memory(out.dtype, [STAGES, BLOCK_R, BLOCK_B], padded.layout)
    result = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()

    total = num_experts * num_a * num_b
    start = gl.program_id(0)
    programs = gl.num_programs(0)

    # `ask_*` is the next step to be asked for, `then_*` the tile after its own, read so early that nothing waits for it.
    ask_index = start
    _, ask_a, ask_b, ask_steps, ask_row = _tile(
        ask_index, total, row_start, tile_start, num_a, num_b, TILE_ROWS, BLOCK_R, GROUP
    )
    _, then_a, then_b, then_steps, then_row = _tile(
        ask_index + programs, total, row_start, tile_start, num_a, num_b, TILE_ROWS, BLOCK_R, GROUP
    )
    while (ask_steps == 0) & (ask_index < total):
        ask_index += programs
        ask_a, ask_b, ask_steps, ask_row = then_a, then_b, then_steps, then_row
        _, then_a, then_b, then_steps, then_row = _tile(
            ask_index + programs, total, row_start, tile_start, num_a, num_b, TILE_ROWS, BLOCK_R, GROUP
        )
    ask_step = gl.to_tensor(0)
    ask_stage = gl.to_tensor(0)
    for _ahead in gl.static_range(STAGES - 1):
        (
            ask_index, ask_a, ask_b, ask_steps, ask_row, then_a, then_b, then_steps, then_row, ask_step, ask_stage,
        ) = _ask(
            tokens, padded, lefts, rights, ready, row_start, tile_start, total, programs,
            ask_index, ask_a, ask_b, ask_steps, ask_row, then_a, then_b, then_steps, then_row, ask_step, ask_stage,
            num_a, num_b, TILE_ROWS, BLOCK_A, BLOCK_B, BLOCK_R, GROUP, STAGES,
        )  # fmt: skip

    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    index = start
    next_expert, next_a, next_b, next_steps, _ = _tile(
        index, total, row_start, tile_start, num_a, num_b, TILE_ROWS, BLOCK_R, GROUP
    )
    while index < total:
        expert, a_tile, b_tile, steps = next_expert, next_a, next_b, next_steps
        next_expert, next_a, next_b, next_steps, _ = _tile(
            index + programs, total, row_start, tile_start, num_a, num_b, TILE_ROWS, BLOCK_R, GROUP
        )
        acc = gl.zeros([BLOCK_A, BLOCK_B], gl.float32, layout)
        for _step in range(steps):
            mbarrier.wait(ready.index(stage), phase)
            product = warpgroup_mma(lefts.index(stage).permute([1, 0]), rights.index(stage), acc, is_async=True)
            # All but this product are done: the stage before it is free for the step that is asked for now.
            acc = warpgroup_mma_wait(1, deps=[product])
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
            (
                ask_index, ask_a, ask_b, ask_steps, ask_row, then_a, then_b, then_steps, then_row, ask_step, ask_stage,
            ) = _ask(
                tokens, padded, lefts, rights, ready, row_start, tile_start, total, programs,
                ask_index, ask_a, ask_b, ask_steps, ask_row, then_a, then_b, then_steps, then_row, ask_step, ask_stage,
                num_a, num_b, TILE_ROWS, BLOCK_A, BLOCK_B, BLOCK_R, GROUP, STAGES,
            )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[acc])
        tma.store_wait(0)  # the tile before has left its shared memory
        if TOKENS_FIRST:
            result.reshape([BLOCK_A, BLOCK_B]).store(acc.to(out.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [expert, a_tile * BLOCK_A, b_tile * BLOCK_B], result)
        else:
            result.reshape([BLOCK_B, BLOCK_A]).permute([1, 0]).store(acc.to(out.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [expert, b_tile * BLOCK_B, a_tile * BLOCK_A], result)
        index += programs
    tma.store_wait(0)


@gluon.jit
def _ask(
    tokens,
    padded,
    lefts,
    rights,
    ready,
    row_start,
    tile_start,
    total,
    programs,
    ask_index,
    ask_a,
    ask_b,
    ask_steps,
    ask_row,
    then_a,
    then_b,
    then_steps,
    then_row,
    ask_step,
    ask_stage,
    num_a: gl.constexpr,
    num_b: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    BLOCK_A: gl.constexpr,
    BLOCK_B: gl.constexpr,
    BLOCK_R: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Asks for the operands of one step, past the last tile for nothing, and names the step after it."""
    some = ask_index < total
    row = ask_row + ask_step * BLOCK_R
    bar = ready.index(ask_stage)
    mbarrier.expect(bar, tokens.block_type.nbytes + padded.block_type.nbytes, pred=some)
    tma.async_copy_global_to_shared(padded, [row, ask_b * BLOCK_B], bar, rights.index(ask_stage), pred=some)
    tma.async_copy_global_to_shared(tokens, [row, ask_a * BLOCK_A], bar, lefts.index(ask_stage), pred=some)
    ask_stage = gl.where(ask_stage == STAGES - 1, 0, ask_stage + 1)
    ask_step += 1
    if ask_step == ask_steps:
        ask_step = gl.to_tensor(0)
        ask_index += programs
        ask_a, ask_b, ask_steps, ask_row = then_a, then_b, then_steps, then_row
        _, then_a, then_b, then_steps, then_row = _tile(
            ask_index + programs, total, row_start, tile_start, num_a, num_b, TILE_ROWS, BLOCK_R, GROUP
        )
        while (ask_steps == 0) & (ask_index < total):
            ask_index += programs
            ask_a, ask_b, ask_steps, ask_row = then_a, then_b, then_steps, then_row
            _, then_a, then_b, then_steps, then_row = _tile(
                ask_index + programs, total, row_start, tile_start, num_a, num_b, TILE_ROWS, BLOCK_R, GROUP
            )
    return ask_index, ask_a, ask_b, ask_steps, ask_row, then_a, then_b, then_steps, then_row, ask_step, ask_stage


@gluon.jit
def _tile(
    index,
    total,
    row_start,
    tile_start,
    num_a: gl.constexpr,
    num_b: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    BLOCK_R: gl.constexpr,
    GROUP: gl.constexpr,
):
    """`(expert, a tile, b tile, steps, first padded row)` of tile number `index`; past the last tile, of the last."""
    index = gl.minimum(index, total - 1)
    expert = index // (num_a * num_b)
    within = index % (num_a * num_b)
    group = within // (GROUP * num_b)
    size = gl.minimum(num_a - group * GROUP, GROUP)
    a_tile = group * GROUP + (within % (GROUP * num_b)) % size
    b_tile = (within % (GROUP * num_b)) // size
    num_rows = gl.load(row_start + expert + 1) - gl.load(row_start + expert)
    row = gl.load(tile_start + expert) * TILE_ROWS
    return expert, a_tile, b_tile, (num_rows + BLOCK_R - 1) // BLOCK_R, row
