"""The first half of the experts in Gluon, without a GPU: its source run in threads, and compiled for Hopper.

On a GPU `test_moe_triton.py` compares it with the Triton kernel, bit for bit.
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

from patchgen.kernels.elementwise.activations import KINDS, Activation
from patchgen.kernels.moe.triton_gate import gate_constants

BLOCK_M, BLOCK_N, BLOCK_K, ROWS = 8, 8, 2, 2
CONCATENATED, INTERLEAVED, PLAIN = "concatenated", "interleaved", "plain"
gates = st.builds(
    Activation,
    kind=st.sampled_from(KINDS),
    alpha=st.sampled_from([1.0, 1.7]),
    limit=st.sampled_from([float("inf"), 0.5]),
    up_shift=st.sampled_from([0.0, 1.0]),
    limit_after=st.booleans(),
)


@needs_gluon
@settings(max_examples=100)
@given(
    counts=st.lists(st.one_of(st.just(0), st.integers(1, 20)), min_size=1, max_size=5),
    columns=st.integers(1, 20),
    hidden_size=st.integers(BLOCK_K + 1, 32),
    weights=st.sampled_from(
        [(CONCATENATED, False), (INTERLEAVED, False), (PLAIN, False), (INTERLEAVED, True), (PLAIN, True)]
    ),
    gate=gates,
    programs=st.integers(1, 9),
    stages=st.integers(2, 4),
    group=st.integers(1, 3),
    top_k=st.integers(1, 3),
    has_bias=st.booleans(),
    keep=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_row_gets_its_product_and_gate(
    counts, columns, hidden_size, weights, gate, programs, stages, group, top_k, has_bias, keep, seed
):
    """Against NumPy, with the gates of `Activation`: experts without rows, half tiles, columns that no tile divides, fewer
    and more tiles than programs, and none.

    The tokens of no expert hold NaN. What belongs to no expert's row has to stay as it is.
    """
    from patchgen.kernels.moe import gate_up_specialized as module

    generator = np.random.default_rng(seed)
    layout, is_transposed = weights
    gate = Activation(gate.kind, gate.alpha, is_gated=False) if layout == PLAIN else gate
    halves, width = 2 if layout == CONCATENATED else 1, columns * (2 if gate.is_gated else 1)
    num_experts, num_rows = len(counts), sum(counts)
    num_slots = num_rows + top_k - num_rows % top_k
    slots = np.split(generator.permutation(num_slots)[:num_rows], np.cumsum(counts)[:-1])
    slot_of_padded, tile_start, tiles = tables_of(slots, has_unused_tile=bool(generator.integers(2)))

    tokens = np.full((num_slots // top_k, hidden_size), np.nan)
    tokens[np.concatenate(slots) // top_k] = generator.standard_normal((num_rows, hidden_size))
    weight = generator.standard_normal((num_experts, width, hidden_size))
    bias = generator.standard_normal((num_experts, width)) if has_bias else np.zeros((num_experts, width))
    projected = np.full((num_slots, width), np.nan)
    projected[:num_rows] = np.concatenate(
        [tokens[mine // top_k] @ weight[expert].T + bias[expert] for expert, mine in enumerate(slots)]
    )
    kept = np.full(projected.shape if keep else (0, width), np.nan)
    gated = np.full((num_slots, columns), np.nan)
    if is_transposed:
        descriptor = Descriptor(weight.transpose(0, 2, 1), [1, BLOCK_K, BLOCK_N])
    else:
        view = weight.reshape(num_experts * halves, width // halves, hidden_size)
        descriptor = Descriptor(view, [halves, BLOCK_N // halves, BLOCK_K])
    run_kernel(
        module,
        "_specialized_gate_up",
        programs,
        4,
        seed,
        Pointer(tokens.reshape(-1)),
        descriptor,
        Pointer(bias.reshape(-1)) if has_bias else None,
        Pointer(kept.reshape(-1)),
        Pointer(gated.reshape(-1)),
        Pointer(slot_of_padded),
        Pointer(tile_start),
        Pointer(tiles.reshape(-1)),
        num_experts,
        tiles.shape[1],
        module.KernelConfig(
            hidden_size, width, top_k, halves, gate.is_gated, is_transposed, keep, group,
            ROWS, BLOCK_M, BLOCK_N, BLOCK_K, stages,
        ),
        *gate_constants(gate).values(),
    )  # fmt: skip
    if keep:
        np.testing.assert_allclose(kept, projected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(gated, gated_by(gate, layout, projected), rtol=1e-11, atol=1e-11)


def tables_of(slots: list[np.ndarray], has_unused_tile: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The plan for the slots of each expert: `slot_of_padded`, `tile_start` and `tiles`, at least one."""
    tiles_of = [-(-len(mine) // BLOCK_M) for mine in slots]
    tile_start = np.concatenate([[0], np.cumsum(tiles_of)])
    num_tiles = max(int(tile_start[-1]) + has_unused_tile, 1)
    slot_of_padded = np.zeros(num_tiles * BLOCK_M, dtype=int)
    tiles = np.full((3, num_tiles), 10**9)
    end = 0
    for expert, mine in enumerate(slots):
        start, end = end, end + len(mine)
        for tile in range(tile_start[expert], tile_start[expert + 1]):
            first = (tile - tile_start[expert]) * BLOCK_M
            tiles[:, tile] = expert, start + first, end
            rows = np.minimum(first + np.arange(BLOCK_M), len(mine) - 1)
            slot_of_padded[tile * BLOCK_M : (tile + 1) * BLOCK_M] = mine[rows]
    return slot_of_padded, tile_start, tiles


def gated_by(gate: Activation, layout: str, projected: np.ndarray) -> np.ndarray:
    """What the gate makes of the projection in its layout."""
    values = torch.from_numpy(projected)
    if not gate.is_gated:
        return gate.activate(values).numpy()
    if layout == INTERLEAVED:
        return gate.gate(values[:, ::2], values[:, 1::2]).numpy()
    return gate.gate(*values.chunk(2, dim=1)).numpy()


@needs_gluon
def test_no_loop_carries_a_plain_copy():
    from patchgen.kernels.moe import gate_up_specialized as module

    assert copies_not_carried(*sources(module)) == []


@needs_gluon
@pytest.mark.slow
def test_the_kernel_compiles_for_hopper_without_one(tmp_path):
    """Four products per step for each of two groups of warps; within the shared memory of a multiprocessor, nothing
    spilled, and no compiler's trap."""
    kernels = compile_for_hopper(_launch_variants, tmp_path)
    assert kernels == [SOUND | {"products": {"m64n256k16": 8}}] * 4


def _launch_variants() -> None:
    from patchgen.kernels.moe import gate_up_specialized as module

    numbers = torch.zeros(3, 256, dtype=torch.int32)
    plan = SimpleNamespace(num_experts=3, slot_of_padded=numbers[0], tile_start=numbers[0], tiles=numbers)
    for layout, is_transposed, has_bias, keep, hidden_size, dtype in (
        (CONCATENATED, False, False, True, 2048, torch.bfloat16),
        (CONCATENATED, False, True, False, 2056, torch.float16),
        (INTERLEAVED, True, True, True, 2880, torch.bfloat16),
        (PLAIN, False, False, True, 192, torch.bfloat16),
    ):
        gate = Activation(is_gated=layout != PLAIN)
        width = 640 if gate.is_gated else 320
        shapes = ((64, hidden_size), (3, hidden_size, width) if is_transposed else (3, width, hidden_size), (3, width))
        x, weight, bias, kept, gated = (
            torch.zeros(shape, dtype=dtype) for shape in (*shapes, (128, width), (128, 320))
        )
        halves = 2 if layout == CONCATENATED else 1
        module.specialized_gate_up(
            x, weight, bias if has_bias else None, kept, gated, plan, 2, gate, is_transposed, halves, keep
        )
