"""What the kernels with warp specialization share: where they run, and the ring of stages between their roles.

Some warps load into a ring of stages in shared memory, two groups of four multiply and execute no load instruction:

    loads       tile 0: step 0 | step 1 | ... | tile 1: step 0 | ...      as far ahead as there are free stages
                   full |  ^ empty
    products 0     v       |     the first half of each tile
    products 1                   the second half

The loads run ahead over the ends of tiles, so that the first steps of a tile lie in shared memory when the last product of
the tile before is done; Triton's own pipelines end with each tile. `full` of a stage counts what arrived in it, `empty` the
two groups that have done with it.

They are written in Gluon, an experimental language whose interface changes from release to release: they serve the releases
of Triton in which they were run, on the one architecture with `wgmma`. Elsewhere the Triton kernels compute the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MULTIPLIERS = gl.constexpr(2)
"""Groups of warps that multiply; each frees every stage, also where it had nothing to multiply."""


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
