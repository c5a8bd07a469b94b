"""The account of a step: kernels of several streams, by class, and the time in which nothing computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_step_account


def test_time_beside_a_product_is_no_exchange_alone():
    """Two streams, by hand: 10 ms of a product, a copy between GPUs from 5 to 14, a gap, AdamW from 16 to 20."""
    events = [("_adamw", 16, 20), ("nvjet_sm90_tst_256x128", 0, 10), ("Memcpy PtoP (Device -> Device)", 5, 14)]
    found = bench_step_account.summary([(name, start * 10**6, end * 10**6) for name, start, end in events], steps=2)
    assert {what: (time, count) for what, time, count in found} == {
        "matrix products": (5, 0.5),
        "exchange": (4.5, 0.5),
        "adamw": (2, 0.5),
        "a step": (10, 0),
        "computing": (7, 0),
        "exchange alone": (2, 0),
        "nothing": (1, 0),
    }


def test_kernels_that_push_rows_and_sum_received_ones_are_exchange():
    assert {bench_step_account.class_of(name) for name in ("_push", "_sum_received")} == {"exchange"}


def test_only_layouts_that_it_can_build_are_offered():
    offered = bench_step_account.SUPPORTED
    assert {"FSDP, graph", "EP2, peer memory, graph", "EP2 x SP2"} <= {*offered}
    assert not {"transformers", "torchtitan, EP2", "FSDP, collectives", "FSDP, kept gathered"} & {*offered}
