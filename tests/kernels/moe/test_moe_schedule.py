"""Where the kernels with warp specialization are used; without a GPU: its properties are patched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton

from patchgen.kernels.moe.gate_up import _is_specialized_for
from patchgen.kernels.moe.schedule import is_specialized_here


@pytest.mark.parametrize(
    ("capability", "release", "interpret", "address", "expected"),
    [
        ((9, 0), "3.6.0", False, 32, True),
        ((9, 0), "3.60.0", False, 32, False),
        ((9, 0), "3.7.0", False, 32, False),
        ((10, 0), "3.6.0", False, 32, False),
        ((8, 0), "3.6.0", False, 32, False),
        ((9, 0), "3.6.0", True, 32, False),
        ((9, 0), "3.6.0", False, 34, False),
    ],
)
def test_warp_specialization_needs_hopper_triton_3_6_and_an_aligned_address(
    capability, release, interpret, address, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", release)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
    assert is_specialized_here(SimpleNamespace(is_cuda=True, device=None, data_ptr=lambda: address)) == expected


def test_no_warp_specialization_on_the_cpu():
    assert not is_specialized_here(torch.zeros(1))


@pytest.mark.parametrize(
    ("hidden_size", "is_transposed", "num_column_ranges", "expected"),
    [(64, False, 2, False), (72, False, 2, True), (72, True, 1, True), (72, False, 1, True), (2048, True, 2, False)],
)
def test_gate_up_is_specialized_except_for_two_transposed_ranges_or_a_single_step(
    hidden_size, is_transposed, num_column_ranges, expected
):
    assert _is_specialized_for(hidden_size, is_transposed, num_column_ranges) == expected
