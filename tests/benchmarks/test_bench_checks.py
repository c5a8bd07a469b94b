"""What benches compare and count: a value that is not a number never passes, and only what ran is named."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_data
import bench_scaling
import train_cases

NAN = float("nan")
ROW = {"layers": 2, "who": "ours", "layout": "FSDP", "ckpt": "none", "tokens/GPU": 64, "s/step": 1.0}
ROW |= {"tokens/s/GPU": 64.0, "loss 1": 5.0, "norm 1": 1.0}


def test_a_gradient_or_norm_that_is_not_a_number_does_not_pass():
    theirs = ROW | {"who": train_cases.TRANSFORMERS}
    assert train_cases.compare([dict(ROW), dict(theirs)]) == []
    (problem,) = train_cases.compare([ROW | {"norm 1": NAN}, dict(theirs)])
    assert "norm 1 nan" in problem


def test_a_gradient_of_the_omni_model_that_is_not_a_number_does_not_pass():
    bench_omni = pytest.importorskip("bench_omni")
    bar = {"a": 0.1, "b": NAN, "c": 0.1}
    found = bench_omni.too_far({"a": NAN, "b": 0.1, "c": 0.1}, bar)
    assert [line[0] for line in found] == ["a", "b"]


def test_agreement_names_the_peers_that_ran():
    assert bench_scaling.agreement([ROW]) == "no peer's first step to compare with"
    rows = [ROW, ROW | {"who": train_cases.TITAN}, {"who": train_cases.TRANSFORMERS, "s/step": "out of memory"}]
    assert bench_scaling.agreement(rows) == "first steps agree with those of torchtitan"


def test_waits_are_counted_in_layouts_that_fit_and_were_asked_for():
    bench_parallel = pytest.importorskip("bench_parallel")
    assert bench_parallel.cases_of_syncs(["FSDP", "EP2"], 1, 9) == [("FSDP", None)]
    assert bench_parallel.cases_of_syncs(["FSDP"], 2, 9) == [("FSDP", None)]
    assert bench_parallel.cases_of_syncs(["FSDP", "EP2"], 2, 9) == [("FSDP", None), ("EP2", None), ("EP2", 9)]


def test_efficiency_counts_the_ranks_without_a_batch(tmp_path):
    lengths = np.full(3, 64)
    for ranks, expected in ((1, "1.0000"), (2, "0.7500")):
        row = bench_data.measure(tmp_path, lengths, packing=True, budget=64, ranks=ranks, seconds=0.05)
        assert row[bench_data.COLUMNS.index("efficiency")] == expected
