"""The products in FP8 in Gluon, without a GPU: their source run in threads, and compiled for Hopper.

On a GPU `test_moe_fp8.py` compares them with the Triton kernels, bit for bit.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offline_hopper import SOUND, compile_for_hopper, needs_gluon
from threaded_gluon import Descriptor, Pointer, copies_not_carried, run_kernel, sources

BLOCK_M, BLOCK_N, BLOCK_K = 4, 8, 2


def launch(programs: int, seed: int, left, right, out, left_scales, right_scales, tile_start, tiles, config) -> None:
    from patchgen.kernels.moe import fp8_product_specialized as module

    run_kernel(
        module,
        "_specialized_product",
        programs,
        4,
        seed,
        Descriptor(left, [BLOCK_M, BLOCK_K]),
        Descriptor(right, [BLOCK_N, BLOCK_K]),
        Descriptor(out, [1, BLOCK_M // 2, BLOCK_N // 2]),
        Pointer(left_scales),
        Pointer(right_scales),
        Pointer(tile_start),
        Pointer(tiles.reshape(-1)),
        len(tile_start) - 1,
        tiles.shape[1],
        module.KernelConfig(*config, BLOCK_M, BLOCK_N, BLOCK_K, stages=2 + seed % 3),
    )


def described(counts: list[int], spare: int) -> tuple[np.ndarray, np.ndarray]:
    """`tile_start [E + 1]` and `tiles [3, M]` of experts with so many tiles, and a tile that is not used or none."""
    tile_start = np.concatenate([[0], np.cumsum(counts)])
    num_tiles = max(int(tile_start[-1]) + spare, 1)
    tiles = np.zeros((3, num_tiles), int)
    tiles[0, : tile_start[-1]] = np.repeat(np.arange(len(counts)), counts)
    return tile_start, tiles


experts = st.lists(st.integers(0, 4), min_size=1, max_size=4)
common = {
    "counts": experts,
    "spare": st.integers(0, 1),
    "programs": st.integers(1, 7),
    "group": st.integers(1, 3),
    "seed": st.integers(0, 2**16),
}


@needs_gluon
@settings(max_examples=40)
@given(**common, columns=st.integers(1, 20), depth=st.integers(1, 9))
def test_rows_are_multiplied_with_the_weight_of_their_expert(counts, spare, programs, group, seed, columns, depth):
    """Against NumPy: experts without tiles, columns and depths that no size divides, more programs than tiles."""
    generator = np.random.default_rng(seed)
    tile_start, tiles = described(counts, spare)
    rows = np.full((tiles.shape[1] * BLOCK_M, depth), np.nan)
    used = int(tile_start[-1]) * BLOCK_M
    rows[:used] = generator.standard_normal((used, depth))
    weight = generator.standard_normal((len(counts), columns, depth))
    row_scales, weight_scales = generator.random(len(rows)), generator.random((len(counts), columns))
    expected, expert = np.full((1, len(rows), columns), np.nan), np.repeat(tiles[0], BLOCK_M)
    for row in range(used):
        expected[0, row] = weight[expert[row]] @ rows[row] * row_scales[row] * weight_scales[expert[row]]
    out, flat = np.full_like(expected, np.nan), weight.reshape(-1, depth)
    config = (False, depth, 0, columns, group)
    launch(programs, seed, rows, flat, out, row_scales, weight_scales.reshape(-1), tile_start, tiles, config)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


@needs_gluon
@settings(max_examples=40)
@given(**common, sizes=st.tuples(st.integers(1, 9), st.integers(1, 20)))
def test_every_expert_gets_the_gradient_of_its_rows(counts, spare, programs, group, seed, sizes):
    """Against NumPy: experts without rows get zeros, and rows of tiles that are not used have no part."""
    generator = np.random.default_rng(seed)
    tile_start, tiles = described(counts, spare)
    left, right = (np.full((size, tiles.shape[1] * BLOCK_M), np.nan) for size in sizes)
    used = int(tile_start[-1]) * BLOCK_M
    for factor in (left, right):
        factor[:, :used] = generator.standard_normal((len(factor), used))
    scales, expected = generator.random(len(counts)), np.zeros((len(counts), *sizes))
    for expert in range(len(counts)):
        mine = slice(tile_start[expert] * BLOCK_M, tile_start[expert + 1] * BLOCK_M)
        expected[expert] = left[:, mine] @ right[:, mine].T * scales[expert]
    out = np.full_like(expected, np.nan)
    launch(programs, seed, left, right, out, scales, scales, tile_start, tiles, (True, 0, *sizes, group))
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


@needs_gluon
def test_no_loop_carries_a_plain_copy():
    from patchgen.kernels.moe import fp8_product_specialized as module

    assert copies_not_carried(*sources(module)) == []


@needs_gluon
@pytest.mark.slow
def test_the_kernels_compile_for_hopper_without_one(tmp_path):
    """Four products for each part of a step, two parts for each of two groups; nothing spilled, and no compiler's trap.

    Depths of several steps and of one, whole and not.
    """
    kernels = compile_for_hopper(_launch_variants, tmp_path)
    assert [kernel.pop("products") for kernel in kernels] == [{"m64n128k32": 16}] * 8
    assert kernels == [SOUND] * 8


def _launch_variants() -> None:
    from patchgen.kernels.moe.fp8_product_specialized import specialized_gradient, specialized_product

    numbers = torch.zeros(256, dtype=torch.int32)
    bf16, fp16 = torch.bfloat16, torch.float16
    for e, n, d, dtype in ((3, 512, 256, bf16), (1, 208, 144, fp16), (2, 512, 128, bf16), (2, 80, 16, bf16)):
        plan = SimpleNamespace(
            num_experts=e, num_padded=256, tile_start=numbers, tiles=torch.zeros(3, 256, dtype=torch.int32)
        )
        rows, weight, flat = (torch.zeros(shape).to(torch.float8_e4m3fn) for shape in ((256, d), (e, n, d), (n, 256)))
        specialized_product(rows, torch.zeros(256), weight, torch.zeros(e, n), torch.zeros(256, n, dtype=dtype), plan)
        specialized_gradient(flat, flat, torch.zeros(e), torch.zeros(e, n, n, dtype=dtype), plan)
