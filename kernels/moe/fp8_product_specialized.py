"""The products of `fp8_product` with warps of their own for the loads, in Gluon; see `warp_roles`.

Two groups multiply half of a tile's rows each. A step of 128 along the depth is summed by the tensor cores, which keep few
bits, and then added to sums in fp32, half of the columns at a time: registers hold one such part beside the sums. While one
group adds, the other multiplies. Sums are in the order of the Triton kernels: the same bits.

    P padded rows   D depth   E experts   N columns   A, B columns of the two factors of a weight gradient
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
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

from patchgen.kernels.moe.plan import BLOCK_M, VARYING, Plan, describe_tile, tile_at
from patchgen.kernels.moe.schedule import FP8_ROWS, num_programs, row_tiles_per_group
from patchgen.kernels.moe.warp_roles import MULTIPLIERS, stage_after

_BLOCKS = FP8_ROWS._replace(warps=4, stages=4)
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


class KernelConfig(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        is_gradient: the depth is an expert's rows, else the whole of both tensors.
        depth: D, not read if `is_gradient`.
        rows, columns: P and N, or A and B, of which `rows` is not read unless `is_gradient`.
        group: see `tile_at`.
    """

    is_gradient: bool
    depth: int
    rows: int
    columns: int
    group: int
    block_m: int = BLOCK_M
    block_n: int = _BLOCKS.n
    block_k: int = _BLOCKS.k
    stages: int = _BLOCKS.stages


def specialized_product(
    rows: Tensor, row_scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor, plan: Plan
) -> None:
    """Fills `out [P, N]`: `rows [P, D]` times `weight [E, N, D]`, and their scales `[P]` and `[E, N]`."""
    (num_padded, depth), columns = rows.shape, weight.shape[1]
    group = row_tiles_per_group(_BLOCKS, triton.cdiv(columns, _BLOCKS.n))
    config = KernelConfig(False, depth, 0, columns, group)
    # The last tile of an expert's columns may reach into the next expert's: computed, not stored.
    _launch(rows, weight.view(-1, depth), out.view(1, num_padded, columns), row_scales, weight_scales, plan, config)


def specialized_gradient(left: Tensor, right: Tensor, scales: Tensor, out: Tensor, plan: Plan) -> None:
    """Fills `out [E, A, B]`: the sum over an expert's rows of `left [A, P]` and `right [B, P]`, times `scales [E]`."""
    config = KernelConfig(True, 0, left.shape[0], right.shape[0], _BLOCKS.group)
    _launch(left, right, out, scales, scales, plan, config)


def _launch(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    left_scales: Tensor,
    right_scales: Tensor,
    plan: Plan,
    config: KernelConfig,
) -> None:
    _specialized_product[(num_programs(out, _BLOCKS.per_sm),)](
        _descriptor(left, [config.block_m, config.block_k]),
        _descriptor(right, [config.block_n, config.block_k]),
        _descriptor(out, [1, config.block_m // 2, config.block_n // 2]),
        left_scales,
        right_scales,
        plan.tile_start,
        plan.tiles,
        plan.num_experts,
        plan.tiles.shape[1],
        CONFIG=config,
        num_warps=_BLOCKS.warps,
    )


def _descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """As `warp_roles.descriptor`."""
    return TensorDescriptor.from_tensor(tensor, box, _layout_of(tuple(box), tensor.dtype))


@functools.cache
def _layout_of(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Once for each: made anew, the three of a launch would double the host's time for it."""
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


def _name(specialization) -> str:
    """That profiles tell the two by."""
    config = specialization.constants["CONFIG"]
    return "_fp8_weight_gradient_specialized" if config.is_gradient else "_fp8_product_specialized"


@gluon.jit(do_not_specialize=VARYING, repr=_name)
def _specialized_product(
    left, right, out, left_scales, right_scales, tile_start, tiles, num_experts, num_tiles, CONFIG: gl.constexpr
):
    """Starts the partitions: two that multiply and one that loads. They share a ring of stages: the operands of both
    sides and their barriers. `full` says that a stage's loads are there, `empty` that both groups have multiplied it."""
    STAGES: gl.constexpr = CONFIG.stages
    lefts = gl.allocate_shared_memory(left.dtype, [STAGES, CONFIG.block_m, CONFIG.block_k], left.layout)
    rights = gl.allocate_shared_memory(right.dtype, [STAGES, CONFIG.block_n, CONFIG.block_k], right.layout)
    results = gl.allocate_shared_memory(
        out.dtype, [MULTIPLIERS, 1, out.block_shape[1], out.block_shape[2]], out.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=MULTIPLIERS)
    fence_async_shared()
    ring = (lefts, rights, full, empty)
    if CONFIG.is_gradient:
        total = num_experts * (_tiles_of(CONFIG.rows, CONFIG.block_m) * _tiles_of(CONFIG.columns, CONFIG.block_n))
    else:
        total = gl.load(tile_start + num_experts) * _tiles_of(CONFIG.columns, CONFIG.block_n)
    table = (tile_start, tiles, num_tiles, total)
    scales = (left_scales, right_scales)
    gl.warp_specialize(
        [
            (_multiply, (out, scales, results, ring, table, 0, CONFIG)),
            (_multiply, (out, scales, results, ring, table, 1, CONFIG)),
            (_load, (left, right, ring, table, CONFIG)),
        ],
        [4, 1],
        # Registers per thread, of 168 on average over three times four warps; the first group gets what is left, 232.
        [232, 40],
    )


@gluon.constexpr_function
def _tiles_of(size, block):
    return (size + block - 1) // block


@gluon.jit
def _load(left, right, ring, table, CONFIG: gl.constexpr):
    """Fills one stage after the other with the steps of one tile after the other."""
    lefts, rights, full, empty = ring
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # every stage is empty at first: the first round through them waits for none
    for index in range(gl.program_id(0), table[3], gl.num_programs(0)):
        _, m, n, expert, first, steps = _tile(index, table, CONFIG)
        if CONFIG.is_gradient:
            right_row = n * CONFIG.block_n
        else:
            right_row = expert * CONFIG.columns + n * CONFIG.block_n
        for step in range(steps):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, left.block_type.nbytes + right.block_type.nbytes)
            depth = first + step * CONFIG.block_k
            tma.async_copy_global_to_shared(left, [m * CONFIG.block_m, depth], ready, lefts.index(stage))
            tma.async_copy_global_to_shared(right, [right_row, depth], ready, rights.index(stage))
            stage, phase = stage_after(stage, phase, CONFIG.stages)


@gluon.jit
def _multiply(out, scales, results, ring, table, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    """One half of each tile's rows, by the first or the second group of warps that multiply."""
    HALF: gl.constexpr = CONFIG.block_m // 2
    PIECE: gl.constexpr = CONFIG.block_n // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 32])
    lefts, rights, full, empty = ring
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    next_of_out, next_m, next_n, next_expert, _, next_steps = _tile(gl.program_id(0), table, CONFIG)
    for index in range(gl.program_id(0), table[3], gl.num_programs(0)):
        of_out, m, n, expert, steps = next_of_out, next_m, next_n, next_expert, next_steps
        next_of_out, next_m, next_n, next_expert, _, next_steps = _tile(index + gl.num_programs(0), table, CONFIG)
        nothing = gl.zeros([HALF, PIECE], gl.float32, layout)
        first_sum = gl.zeros([HALF, PIECE], gl.float32, layout)
        second_sum = gl.zeros([HALF, PIECE], gl.float32, layout)
        for _step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            left = lefts.index(stage).slice(WHICH * HALF, HALF, dim=0)
            first = rights.index(stage).slice(0, PIECE, dim=0).permute([1, 0])
            second = rights.index(stage).slice(PIECE, PIECE, dim=0).permute([1, 0])
            first_sum += _part(left, first, nothing)
            part = _part(left, second, nothing)
            mbarrier.arrive(empty.index(stage))
            second_sum += part
            stage, phase = stage_after(stage, phase, CONFIG.stages)
        row = m * CONFIG.block_m + WHICH * HALF
        # `steps > 0` is also what keeps `steps` from being taken for dead; see `grouped_gemm_weights_specialized`.
        place = (of_out, row, n * CONFIG.block_n, expert, steps > 0)
        _store(out, scales, results.index(WHICH), first_sum, place, 0, CONFIG)
        _store(out, scales, results.index(WHICH), second_sum, place, PIECE, CONFIG)
    tma.store_wait(0)


@gluon.jit
def _part(left, right, nothing):
    """`left @ right` as the tensor cores sum it."""
    product = warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[product])


@gluon.jit
def _store(out, scales, result, piece, place, START: gl.constexpr, CONFIG: gl.constexpr):
    """Sends one piece of a tile off; what lies past the end of the tensor, TMA does not write."""
    of_out, row, first_column, expert, any_step = place
    left_scales, right_scales = scales
    rows_of: gl.constexpr = gl.SliceLayout(1, piece.type.layout)
    columns_of: gl.constexpr = gl.SliceLayout(0, piece.type.layout)
    if CONFIG.is_gradient:
        piece *= gl.where(any_step, gl.load(left_scales + expert), 0.0)
    else:
        by_row = gl.load(left_scales + row + gl.arange(0, CONFIG.block_m // 2, layout=rows_of))
        column = first_column + START + gl.arange(0, CONFIG.block_n // 2, layout=columns_of)
        by_column = gl.load(right_scales + expert * CONFIG.columns + column, mask=column < CONFIG.columns, other=0.0)
        piece = piece * by_row[:, None] * by_column[None, :]
    tma.store_wait(0)  # the piece before has left `result`
    result.reshape([CONFIG.block_m // 2, CONFIG.block_n // 2]).store(piece.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [of_out, row, first_column + START], result)


@gluon.jit
def _tile(index, table, CONFIG: gl.constexpr):
    """`(matrix of out, row tile, column tile, expert, first of the depth, steps)` of a tile; past the last, of the last."""
    num_n: gl.constexpr = _tiles_of(CONFIG.columns, CONFIG.block_n)
    tile_start, tiles, num_tiles, total = table
    if CONFIG.is_gradient:
        num_m: gl.constexpr = _tiles_of(CONFIG.rows, CONFIG.block_m)
        index = gl.minimum(index, total - 1)
        expert = index // (num_m * num_n)
        m, n = tile_at(index % (num_m * num_n), num_m, num_n, CONFIG.group)
        begin = gl.load(tile_start + expert)
        end = gl.load(tile_start + expert + 1)
        steps_of_tile: gl.constexpr = CONFIG.block_m // CONFIG.block_k
        return expert, m, n, expert, begin * CONFIG.block_m, (end - begin) * steps_of_tile
    else:
        m, n, expert, _, _ = describe_tile(index, total // num_n, num_n, tiles, num_tiles, CONFIG.group)
        return 0, m, n, expert, 0, _tiles_of(CONFIG.depth, CONFIG.block_k)
