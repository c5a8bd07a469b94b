"""The weight gradients in Gluon, without a GPU: their source run in threads, and compiled for Hopper.

On a GPU `test_moe_triton.py` compares them with the Triton kernel, bit for bit.
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

TILE_ROWS, BLOCK_R, BLOCK_A, BLOCK_B = 8, 2, 4, 8


@needs_gluon
@settings(max_examples=100)
@given(
    counts=st.lists(st.one_of(st.just(0), st.integers(1, 20)), min_size=1, max_size=5),
    columns=st.tuples(st.integers(1, 14), st.integers(1, 20)),
    programs=st.integers(1, 9),
    stages=st.integers(2, 4),
    group=st.integers(1, 3),
    top_k=st.integers(1, 3),
    is_copied=st.booleans(),
    tokens_first=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_expert_gets_the_product_of_its_rows(
    counts, columns, programs, stages, group, top_k, is_copied, tokens_first, seed
):
    """Against NumPy: experts without rows, tiles that no size divides, half tiles, fewer and more tiles than programs.

    What the kernels before it leave unwritten, half tiles at most, holds NaN, as do the output before and the tokens of
    no expert; the row numbers of tiles that are not there name no token.
    """
    from patchgen.kernels.moe import grouped_gemm_weights_specialized as module

    generator = np.random.default_rng(seed)
    num_slots = sum(counts) + top_k - sum(counts) % top_k
    slots = np.split(generator.permutation(num_slots)[: sum(counts)], np.cumsum(counts)[:-1])
    tiles = -(-np.array(counts) // TILE_ROWS)
    row_start, tile_start = (np.concatenate([[0], np.cumsum(sizes)]) for sizes in (counts, tiles))
    num_padded = max(int(tile_start[-1]) + int(generator.integers(2)), 1) * TILE_ROWS  # with an unused tile or none

    tokens = np.full((num_slots // top_k, columns[0]), np.nan)
    copied, padded = (np.full((num_padded, size), np.nan) for size in columns)
    slot_of_padded = np.full(num_padded, 10**9)
    expected = np.zeros((len(counts), *columns))
    for expert, mine in enumerate(slots):
        if not len(mine):
            continue
        tokens[mine // top_k] = generator.standard_normal((len(mine), columns[0]))
        first, rows = tile_start[expert] * TILE_ROWS, np.arange(tiles[expert] * TILE_ROWS)
        slot_of_padded[first + rows] = mine[np.minimum(rows, len(mine) - 1)]
    for expert, mine in enumerate(slots):
        first = tile_start[expert] * TILE_ROWS
        written = first + -(-len(mine) // (TILE_ROWS // 2)) * (TILE_ROWS // 2)
        copied[first:written] = tokens[slot_of_padded[first:written] // top_k]
        padded[first:written] = 0
        padded[first : first + len(mine)] = generator.standard_normal((len(mine), columns[1]))
        expected[expert] = tokens[mine // top_k].T @ padded[first : first + len(mine)]
    if not tokens_first:
        expected = expected.transpose(0, 2, 1)
    out = np.full(expected.shape, np.nan)
    half, piece = BLOCK_A // 2, BLOCK_B // 2
    run_kernel(
        module,
        "_specialized_gemm_weights",
        programs,
        4,
        seed,
        Descriptor(copied, [BLOCK_R, BLOCK_A]) if is_copied else Pointer(tokens.reshape(-1)),
        Descriptor(padded, [BLOCK_R, BLOCK_B]),
        Descriptor(out, [1, half, piece] if tokens_first else [1, piece, half]),
        Pointer(slot_of_padded),
        Pointer(row_start),
        Pointer(tile_start),
        len(counts),
        num_padded,
        module.KernelConfig(
            *columns, top_k, is_copied, tokens_first, TILE_ROWS, BLOCK_A, BLOCK_B, BLOCK_R, group=group, stages=stages
        ),
    )
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


@needs_gluon
def test_no_loop_carries_a_plain_copy():
    from patchgen.kernels.moe import grouped_gemm_weights_specialized as module

    assert copies_not_carried(*sources(module)) == []
    assert copies_not_carried(_carry_a_copy) == ["last, first = (stage, first)"]


def _carry_a_copy() -> None:
    stage = first = 1
    last = stage
    for _ in range(3):
        last, first = stage, first
        stage = stage + last


@needs_gluon
@pytest.mark.slow
def test_the_kernel_compiles_for_hopper_without_one(tmp_path):
    """Four products per step for each of two groups of warps, the narrow ones where the columns need them; within the
    shared memory of a multiprocessor, nothing spilled, and no compiler's trap."""
    kernels = compile_for_hopper(_launch_variants, tmp_path)
    wide, narrow = {"m64n256k16": 8}, {"m64n256k16": 8, "m64n128k16": 8}
    assert [kernel.pop("products") for kernel in kernels] == [wide, wide, narrow, narrow]
    assert kernels == [SOUND] * 4


def _launch_variants() -> None:
    from patchgen.kernels.moe.grouped_gemm_weights_specialized import specialized_gemm_weights

    numbers = torch.zeros(256, dtype=torch.int32)
    for e, a, b, is_copied, tokens_first, dtype in (
        (3, 256, 512, True, True, torch.bfloat16),
        (1, 256, 512, False, False, torch.float16),
        (1, 136, 328, True, False, torch.float16),
        (3, 136, 328, False, True, torch.bfloat16),
    ):
        plan = SimpleNamespace(
            num_experts=e, row_start=numbers, tile_start=numbers, slot_of_padded=numbers, num_padded=256
        )
        tokens, padded = torch.zeros(256, a, dtype=dtype), torch.zeros(256, b, dtype=dtype)
        out = torch.zeros((e, a, b) if tokens_first else (e, b, a), dtype=dtype)
        specialized_gemm_weights(tokens, tokens if is_copied else None, padded, out, plan, 2, tokens_first)
