"""The weight gradients in Gluon, without a GPU: their source run program after program, and compiled for Hopper.

On a GPU `test_moe_triton.py` compares them with the Triton kernel, bit for bit.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from sequential_gluon import Descriptor, Pointer, run_kernel

from patchgen.kernels.grouped_gemm_weights import has_pipelined
from patchgen.kernels.unsupported import UnsupportedOptionError

needs_gluon = pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the kernel serves Triton 3.6")
TILE_ROWS, BLOCK_R, BLOCK_A, BLOCK_B = 8, 2, 4, 8


@needs_gluon
@settings(max_examples=60)
@given(
    counts=st.lists(st.one_of(st.just(0), st.integers(1, 20)), min_size=1, max_size=6),
    columns=st.tuples(st.integers(1, 14), st.integers(1, 20)),
    programs=st.integers(1, 9),
    stages=st.integers(2, 4),
    group=st.integers(1, 3),
    tokens_first=st.booleans(),
)
def test_every_expert_gets_the_product_of_its_rows(counts, columns, programs, stages, group, tokens_first):
    """Against NumPy: experts without rows, tiles that no size divides, fewer and more tiles than programs.

    What the kernels before it leave unwritten, half tiles at most, holds NaN, as does the output before.
    """
    from patchgen.kernels import grouped_gemm_weights_pipelined as module

    counts = np.array(counts)
    tiles = -(-counts // TILE_ROWS)
    row_start, tile_start = (np.concatenate([[0], np.cumsum(sizes)]) for sizes in (counts, tiles))
    generator = np.random.default_rng(0)
    sides = [np.full((max(int(tile_start[-1]), 1) * TILE_ROWS, size), np.nan) for size in columns]
    expected = np.zeros((len(counts), *columns))
    for expert, count in enumerate(counts):
        first = tile_start[expert] * TILE_ROWS
        written = -(-count // (TILE_ROWS // 2)) * (TILE_ROWS // 2)
        for side in sides:
            side[first : first + written] = 0
            side[first : first + count] = generator.standard_normal((count, side.shape[1]))
        expected[expert] = sides[0][first : first + count].T @ sides[1][first : first + count]
    if not tokens_first:
        expected = expected.transpose(0, 2, 1)
    out = np.full(expected.shape, np.nan)
    run_kernel(
        module,
        "_pipelined_gemm_weights",
        programs,
        Descriptor(sides[0], [BLOCK_R, BLOCK_A]),
        Descriptor(sides[1], [BLOCK_R, BLOCK_B]),
        Descriptor(out, [1, BLOCK_A, BLOCK_B] if tokens_first else [1, BLOCK_B, BLOCK_A]),
        Pointer(row_start),
        Pointer(tile_start),
        len(counts),
        A=columns[0],
        B=columns[1],
        TOKENS_FIRST=tokens_first,
        TILE_ROWS=TILE_ROWS,
        BLOCK_A=BLOCK_A,
        BLOCK_B=BLOCK_B,
        BLOCK_R=BLOCK_R,
        GROUP=group,
        STAGES=stages,
    )
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


COMPILE = """
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
))
from patchgen.kernels import grouped_gemm_weights_pipelined as module

kernel, made = module._pipelined_gemm_weights, []
class Compiled:
    def __getitem__(self, grid):
        return lambda *arguments, **options: made.append(kernel.run(*arguments, grid=grid, warmup=True, **options))
module._pipelined_gemm_weights = Compiled()
starts = torch.zeros(4, dtype=torch.int32)
plan = SimpleNamespace(num_experts=3, row_start=starts, tile_start=starts)
for tokens_first, dtype in ((False, torch.bfloat16), (True, torch.float16)):
    copied, padded = torch.zeros(256, 136, dtype=dtype), torch.zeros(256, 328, dtype=dtype)
    module.pipelined_gemm_weights(copied, padded, plan, tokens_first)
for compiled in made:
    text = compiled.asm["ptx"]
    print(text.count("wgmma.mma_async"), "cp.async.bulk.tensor.3d.global" in text, compiled.metadata.shared <= 232448)
"""


@needs_gluon
def test_the_kernel_compiles_for_hopper_without_one(tmp_path):
    """Four products per step in one loop, the result stored by TMA, within the shared memory of a multiprocessor."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines() == ["4 True True"] * 2


def test_it_runs_where_it_is_asked_for_and_nowhere_silently(monkeypatch):
    """Unasked no device has it; asked for, a CPU says what it lacks."""
    assert not has_pipelined(torch.zeros(1))
    monkeypatch.setenv("PATCHGEN_PIPELINED_WEIGHTS", "1")
    with pytest.raises(UnsupportedOptionError, match=r"1 needs compute capability 9\.0 and Triton 3\.6; found cpu"):
        has_pipelined(torch.zeros(1))
