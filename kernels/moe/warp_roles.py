"""Shared parts of the warp-specialized kernels: the ring buffer between loading and multiplying warps, and its products.

Some warps load into a ring of stages in shared memory, two groups of four only multiply:

    loads       tile 0: step 0 | step 1 | ... | tile 1: step 0 | ...      as far ahead as there are free stages
                   full |  ^ empty
    products 0     v       |     the first half of each tile
    products 1                   the second half

Loads run ahead across tile boundaries, so that the first steps of a tile are in shared memory when the last product of the
previous tile ends; Triton's own pipelines end with each tile. `full` of a stage counts the arrivals of its loads, `empty` the
two groups that have consumed it.

The kernels are written in Gluon, an experimental language whose interface changes from release to release, and work around
what one release compiles wrongly: they serve that release, on the one architecture with `wgmma`
(`schedule.is_specialized_here`). Elsewhere the Triton kernels compute the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MULTIPLIERS = gl.constexpr(2)
"""Groups of warps that multiply; each frees every stage, even if it had nothing to multiply."""


def descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """For copies of `box` between `tensor` and shared memory, in the layout that products read."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[tensor.dtype]
    return TensorDescriptor.from_tensor(tensor, box, gl.NVMMASharedLayout.get_default_for(box, dtype))


@gluon.jit
def stage_after(stage, phase, STAGES: gl.constexpr):
    """The stage after `stage`, with the phase that its barriers are in then: each round through the ring flips it."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """The stage before `stage`.

    A variable that is set to another one before a loop and again at its end is silently not carried through the loop:
    the compiler compares objects and takes it for unchanged. So the last stage is derived, not remembered.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def multiply_stage(left, right, acc, empty, stage, is_first, STAGES: gl.constexpr):
    """`acc + left @ right`, still in flight; frees the previous stage, whose product is done.

    The only product of two tiles in these kernels (`schedule.multiply` in the others) but those in FP8.
    """
    product = warpgroup_mma(left, right, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[product])
    mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=is_first == 0)
    return acc


@gluon.jit
def end_products(acc, empty, stage, any_stage, STAGES: gl.constexpr):
    """The sum when all products are done; `stage` is the one after the last, which it frees."""
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=any_stage)
    return acc


@gluon.jit
def pass_by(full, empty, stage, phase, STAGES: gl.constexpr):
    """Skips a step of a tile whose half has nothing to multiply: the loads and the other group wait for this one."""
    mbarrier.wait(full.index(stage), phase)
    mbarrier.arrive(empty.index(stage))
    return stage_after(stage, phase, STAGES)
