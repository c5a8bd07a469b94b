"""Tile sizes of the expert kernels and how they were chosen; the only product of two tiles in Triton.

There is no autotuning: a new shape must not stop a training step for minutes. The sizes below are used for every shape;
the measurements are in kernels/README.md. The rows of a tile are `plan.BLOCK_M`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor


class Blocks(NamedTuple):
    """The tile sizes and launch options of one kernel.

    Attributes:
        n, k: columns and depth of a tile.
        warps, stages: of Triton's launch; with warp specialization of one group that multiplies, and of the ring.
        group: row tiles that run together over all columns, to share their weights in the cache; see
            `row_tiles_per_group`.
        per_sm: programs per multiprocessor.
        pieces: the number of column groups of the epilogue, so that its values fit in registers.
    """

    n: int
    k: int
    warps: int
    stages: int
    group: int
    per_sm: int = 1
    pieces: int = 1

    @property
    def max_registers(self) -> int | None:
        """Per thread, so that `per_sm` programs fit the 64 Ki of a multiprocessor; None: the compiler's choice."""
        return None if self.per_sm == 1 else 2**16 // (self.per_sm * self.warps * 32)


GATE_UP = Blocks(n=256, k=64, warps=8, stages=4, group=16)
GATE_UP_SPECIALIZED = GATE_UP._replace(warps=4, stages=3)
ROWS = Blocks(n=256, k=64, warps=8, stages=3, group=8)
GATE_BACKWARD = Blocks(n=256, k=64, warps=16, stages=4, group=8, pieces=4)
WEIGHTS = Blocks(n=256, k=64, warps=8, stages=3, group=8)
WEIGHTS_SPECIALIZED = WEIGHTS._replace(warps=4, stages=4)
FP8_ROWS = Blocks(n=256, k=128, warps=8, stages=3, group=8)
FP8_WEIGHTS = FP8_ROWS

_FEW_COLUMN_TILES = 8


def row_tiles_per_group(blocks: Blocks, num_n: int) -> int:
    """Row tiles per group in a kernel that gathers its rows, with `num_n` column tiles.

    Concurrent programs should share both operands: 132 programs over 16 row tiles of 128 and 8 column tiles of 256
    read the fewest bytes. With few column tiles, all of them are computed for one row tile at a time: they share its
    gathered rows, which cost more to load than weights (H200 at the clock of a busy GPU, 2026-11-21,
    groups of 1, 4 and 16 in `gate_up`: Qwen3-30B-A3B, with 6 column tiles, 1.475, 1.554 and 1.592 ms; Mixtral, with
    112, 14.9, 13.9 and 12.6; DeepSeek-V3 slice, with 16, 13.3, 13.1 and 12.4; all at 16,384 tokens).
    """
    return 1 if num_n < _FEW_COLUMN_TILES else blocks.group


_COPY_COLUMNS = 2048
_COPY_ROWS_PER_EXPERT = 1536


def copy_pays_off(num_rows: int, num_experts: int, num_columns: int) -> bool:
    """Whether a weight gradient, of `num_columns` in its other factor, should first copy its tokens into row order for TMA.

    The copy costs in proportion to the rows, the product in proportion to rows times columns, and many rows per expert gain
    most (H200, 2026-11-21, both weight gradients, gathered against copied, the copy included: gpt_oss dimensions
    6.1 to 5.7 ms, DeepSeek-V3 slice 19.6 to 18.4, Mixtral 18.0 to 18.0, Qwen3-30B-A3B 2.02 to 2.25; with the results stored
    by TMA gpt_oss 5.82 to 5.43, Qwen3-30B-A3B 2.10 to 2.46). With warp specialization the rule still holds, `d_gate_up` without the
    copy: gpt_oss 3.78 and 3.35, the copy 0.14; Qwen3-30B-A3B 1.37 and 1.37, the copy 0.18.
    """
    return num_columns >= _COPY_COLUMNS and num_rows >= _COPY_ROWS_PER_EXPERT * num_experts


SPECIALIZED_RELEASES = ("3.6.0",)
_SPECIALIZED_CAPABILITY = (9, 0)
_COPIED_BYTES = 16


def is_specialized_here(tensor: Tensor) -> bool:
    """Whether the warp-specialized kernels (`warp_roles`) support `tensor`: its device and address, and this Triton."""
    return (
        tensor.is_cuda
        and torch.cuda.get_device_capability(tensor.device) == _SPECIALIZED_CAPABILITY
        and triton.__version__ in SPECIALIZED_RELEASES
        and not triton.knobs.runtime.interpret
        and tensor.data_ptr() % _COPIED_BYTES == 0
    )


_PROGRAMS_OF_INTERPRETER = 3
_ROUNDS_WITH_COLLECTIVES = 4


def num_programs(tensor: Tensor, per_sm: int) -> int:
    """Programs of a persistent grid, `per_sm` per multiprocessor; a few in Triton's interpreter on the CPU.

    Concurrent collectives occupy some multiprocessors. Programs that find no free one run after others have ended, which
    doubles the kernel's time with a single round of programs: with several ranks there are several shorter rounds.
    """
    if not tensor.is_cuda:
        return _PROGRAMS_OF_INTERPRETER
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    rounds = _ROUNDS_WITH_COLLECTIVES if ranks > 1 else 1
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count * per_sm * rounds


@triton.jit
def multiply(a, b, acc):
    """`acc + a @ b`, the only product of two tiles in the Triton kernels but those in FP8 (in Gluon
    `warp_roles.multiply_stage`)."""
    return tl.dot(a, b, acc, input_precision="ieee")
