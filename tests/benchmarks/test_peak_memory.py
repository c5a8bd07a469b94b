"""The account of a peak: what is alive then, by owner, and what was there before."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import peak_memory

OURS = {"filename": "/x/patchgen/kernels/moe/gate_up.py", "name": "gate_up", "line": 62}
TORCH = {"filename": "/x/torch/functional.py", "name": "matmul", "line": 1}
CASE = {"filename": "/x/patchgen/benchmarks/bench.py", "name": "step", "line": 9}
AGAIN = {"filename": "/x/torch/utils/checkpoint.py", "name": "recompute_fn", "line": 5}


def event(action: str, address: int, size: int, *frames: dict) -> dict:
    return {"action": action, "addr": address, "size": size, "frames": list(frames)}


def test_the_peak_is_of_what_is_alive_then():
    big = 2**28
    trace = [
        event("alloc", 1, 700, TORCH, OURS),
        event("free_requested", 1, 700),
        event("free_completed", 1, 700),
        event("free_requested", 99, 100),  # of the 1000 bytes before the block
        event("alloc", 1, 300, OURS),  # the same address, again in use
        event("segment_alloc", 5, 10**12),
        event("alloc", 2, 200, TORCH, OURS, AGAIN, CASE),
        event("alloc", 3, 50, CASE),
        event("alloc", 4, big, TORCH),
        event("free_requested", 4, big),
        event("alloc", 6, 60, OURS),
    ]
    found = peak_memory.account(trace, before=1000)
    assert found == {
        "autograd, tensors of 0.25 GiB": big,
        peak_memory.BEFORE: 900,
        "gate_up.gate_up:62": 300,
        "gate_up.gate_up:62 (again)": 200,
        "small tensors": 50,
    }
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_without_allocations_the_peak_is_what_was_there():
    assert peak_memory.account([event("free_requested", 99, 100)], before=1000) == {peak_memory.BEFORE: 1000}
