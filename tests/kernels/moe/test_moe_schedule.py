"""Where the kernels with warp specialization are used; a GPU is not asked."""

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
def test_one_architecture_one_release_whole_copies(capability, release, interpret, address, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", release)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
    assert is_specialized_here(SimpleNamespace(is_cuda=True, device=None, data_ptr=lambda: address)) == expected


def test_not_on_the_cpu():
    assert not is_specialized_here(torch.zeros(1))


@pytest.mark.parametrize(
    ("hidden_size", "is_transposed", "halves", "expected"),
    [(64, False, 2, False), (72, False, 2, True), (72, True, 1, True), (72, False, 1, True), (2048, True, 2, False)],
)
def test_gate_and_up_that_one_copy_brings_in_more_than_one_step(hidden_size, is_transposed, halves, expected):
    assert _is_specialized_for(hidden_size, is_transposed, halves) == expected
