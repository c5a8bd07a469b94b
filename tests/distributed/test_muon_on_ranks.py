"""Muon on four ranks, however they divide matrices and stacks, beside one rank: each matrix is orthogonalised as a whole."""

from __future__ import annotations

import cases_muon as cases
import pytest
import torch

from patchgen.runtime.train.muon import STEPS

BF16 = 2.0**-8
LAYOUTS = {
    "stacks by experts": (8, {}),
    "stacks by experts, some ranks without any": (2, {}),
    "experts on two ranks each": (8, {"ep": 2}),
    "one expert by rows on two ranks, of two": (2, {"ep": 2}),
    "two copies of the model": (8, {"dp_replicate": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_matrix_is_orthogonalised_as_a_whole(name, one_rank, four_ranks):
    """What differs is how products of bf16 matrices are rounded, in batches of other sizes."""
    experts, layout = LAYOUTS[name]
    ((before, expected),) = one_rank.run(cases.steps, experts, {})
    for _, found in four_ranks.run(cases.steps, experts, layout):
        assert found.keys() == expected.keys() and any("experts.gate_up_proj" in path for path in found)
        for path, whole in expected.items():
            largest_step = 2 * cases.LR * 0.2 * max(whole.shape[-2:]) ** 0.5
            difference = (found[path] - whole).norm() / whole[..., 0, 0].numel() ** 0.5
            assert difference < STEPS * BF16 * largest_step, path
            assert (whole - before[path]).norm() / whole[..., 0, 0].numel() ** 0.5 > largest_step / 4, path


def test_a_stack_by_columns(four_ranks):
    for found, whole in four_ranks.run(cases.by_columns):
        torch.testing.assert_close(found, whole, rtol=0, atol=STEPS * BF16 * cases.LR * 0.2 * 12**0.5)
