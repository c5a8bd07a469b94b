"""Each kernel of the experts alone, at the clock of a busy GPU, and cuBLAS on the same product: time, clock, power, energy.

    python benchmarks/bench_moe_kernels.py --shape qwen3

A kernel runs over and over for `--seconds`; the L2 is not emptied. Clock and power are what `nvidia-smi` says during the
last two thirds of that. cuBLAS multiplies as many rows with one weight, without routing. Appends to
benchmarks/results_moe_kernels.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_moe import SHAPES, make_problem, versions

from patchgen.kernels.elementwise.activations import Activation
from patchgen.kernels.moe.combine import combine
from patchgen.kernels.moe.gate_backward import gate_backward_gemm
from patchgen.kernels.moe.gate_up import gate_up
from patchgen.kernels.moe.grouped_gemm import grouped_gemm
from patchgen.kernels.moe.grouped_gemm_weights import grouped_gemm_weights
from patchgen.kernels.moe.pad_rows import pad_rows
from patchgen.kernels.moe.plan import make_plan
from patchgen.kernels.moe.schedule import copy_pays_off

RESULTS = Path(__file__).with_name("results_moe_kernels.csv")
COLUMNS: tuple[str, ...] = ("date", "versions", "shape", "tokens", "kernel", "ms", "tflops", "mhz", "watts", "joules")
SILU = Activation("silu", 1.0, float("inf"), 0.0, False, True)


class Samples:
    """Clock in MHz and power in W over time, sampled by a separate process."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float, float]] = []
        query = "--query-gpu=clocks.sm,power.draw.instant"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "40"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            clock, power = (float(field) for field in line.split(","))
            self.found.append((time.time(), clock, power))

    def mean(self, start: float, end: float) -> tuple[float, float]:
        inside = [sample[1:] for sample in self.found if start < sample[0] < end]
        clocks, powers = zip(*inside, strict=True) if inside else ((0.0,), (0.0,))
        return statistics.fmean(clocks), statistics.fmean(powers)


def measure(function: Callable[[], object], seconds: float, samples: Samples) -> tuple[float, float, float]:
    """Milliseconds per call, MHz, W."""
    function()
    torch.cuda.synchronize()
    started = time.time()
    function()
    torch.cuda.synchronize()
    count = max(5, int(seconds / max(time.time() - started, 1e-4)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    started = time.time()
    events[0].record()
    for _ in range(count):
        function()
    events[1].record()
    torch.cuda.synchronize()
    ended = time.time()
    return events[0].elapsed_time(events[1]) / count, *samples.mean(started + (ended - started) / 3, ended)


def kernels(shape_name: str, tokens: int) -> dict[str, tuple[Callable[[], object], float]]:
    """What is measured, each with its FLOPs; 0 where it multiplies nothing. `_R`: R rows, top-k for each token."""
    problem = make_problem(SHAPES[shape_name], tokens, "random")
    shape, rows = problem.shape, problem.rows
    x, weights, w1, w2 = (leaf.detach() for leaf in problem.leaves)
    grad, k = problem.grad, shape.top_k
    plan = make_plan(problem.index, shape.experts)
    gate_up_out, gated = gate_up(x, w1, None, plan, k, SILU, False, False, problem.index.numel(), True)
    padded_grad = pad_rows(grad, k, plan) if copy_pays_off(plan.num_rows, shape.experts, shape.inner) else None
    padded_x = pad_rows(x, k, plan) if copy_pays_off(plan.num_rows, shape.experts, 2 * shape.inner) else None
    dh, weighted, _ = gate_backward_gemm(grad, padded_grad, w2, gate_up_out, weights, plan, SILU, False, False)
    y = grouped_gemm(gated, w2, None, plan, k_is_last=True, is_padded=False)
    x_R, h_R, a_R = (
        torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
        for size in (shape.hidden, 2 * shape.inner, shape.inner)
    )
    flops_down = 2 * rows * shape.hidden * shape.inner
    return {
        "cublas gate_up": (lambda: torch.mm(x_R, w1[0].T), 2 * flops_down),
        "gate_up": (lambda: gate_up(x, w1, None, plan, k, SILU, False, False, problem.index.numel(), True), 2 * flops_down),
        "cublas down": (lambda: torch.mm(a_R, w2[0].T), flops_down),
        "down": (lambda: grouped_gemm(gated, w2, None, plan, k_is_last=True, is_padded=False), flops_down),
        "combine": (lambda: combine(y, weights, plan, k), 0),
        "pad_rows": (lambda: pad_rows(x, k, plan), 0),
        "cublas gate_backward": (lambda: torch.mm(x_R, w2[0]), flops_down),
        "gate_backward": (
            lambda: gate_backward_gemm(grad, padded_grad, w2, gate_up_out, weights, plan, SILU, False, False), flops_down,
        ),
        "cublas dx": (lambda: torch.mm(h_R, w1[0]), 2 * flops_down),
        "dx": (lambda: grouped_gemm(dh, w1, None, plan, k_is_last=False, is_padded=True), 2 * flops_down),
        "cublas d_down": (lambda: torch.mm(x_R.T, a_R), flops_down),
        "d_down": (lambda: grouped_gemm_weights(grad, padded_grad, weighted, plan, k, tokens_first=True), flops_down),
        "cublas d_gate_up": (lambda: torch.mm(h_R.T, x_R), 2 * flops_down),
        "d_gate_up": (lambda: grouped_gemm_weights(x, padded_x, dh, plan, k, tokens_first=False), 2 * flops_down),
    }  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", default="qwen3", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=0.45, help="per kernel")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    samples = Samples()
    is_new = not options.results.exists()
    with options.results.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        if is_new:
            table.writeheader()
        for name, (function, flops) in kernels(options.shape, options.tokens).items():
            ms, clock, power = measure(function, options.seconds, samples)
            row = {
                "date": datetime.date.today().isoformat(),
                "versions": versions(),
                "shape": options.shape,
                "tokens": options.tokens,
                "kernel": name,
                "ms": round(ms, 3),
                "tflops": round(flops / ms / 1e9),
                "mhz": round(clock),
                "watts": round(power),
                "joules": round(ms * power / 1e3, 3),
            }
            table.writerow(row)
            print("| " + " | ".join(str(row[column]) for column in COLUMNS[4:]) + " |", flush=True)
    samples.process.terminate()


if __name__ == "__main__":
    main()
