"""The experts in FP8 beside those in bf16: errors, times of the layer and of each kernel, memory.

    python benchmarks/bench_moe_fp8.py --shapes qwen3 dsv3_slice

Options: `triton` is bf16; `fp8` quantises its weights in each forward and backward; `fp8, weights before` finds them
quantised in both orientations, as an optimizer that writes them once per step would leave them. All in one process, in
turns, on a busy GPU (`bench_moe.Timed`); errors against fp32, expert by expert, at `--check-tokens`. Appends to
results_moe_fp8.csv.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable
from pathlib import Path

import torch
from bench_moe import (
    ROUNDS,
    SHAPES,
    Problem,
    Timed,
    gradients,
    is_repeatable,
    layer,
    make_problem,
    memory_of,
    ours,
    versions,
)
from bench_moe import reference as exact_layer
from result_rows import append
from torch import Tensor

from patchgen.kernels.moe import fp8_backend, fp8_product
from patchgen.kernels.moe.fp8_values import DTYPE, quantise_transposed, quantise_weight
from patchgen.kernels.moe.plan import BLOCK_M, Plan

RESULTS = Path(__file__).with_name("results_moe_fp8.csv")
COLUMNS = ("date", "versions", "commit", "shape", "tokens", "routing", "what", "ms", "calls", "forward_ms", "of_bf16",
           "saved_mib", "peak_mib", "errors")  # fmt: skip
OUTPUTS = ("out", "x", "weights", "gate_up", "down")
WEIGHTS_BEFORE = "fp8, weights before"


def options() -> dict[str, Callable[[Problem], Tensor]]:
    return {"triton": functools.partial(ours, "triton"), "fp8": _fp8, WEIGHTS_BEFORE: _with_weights_before()}


def _fp8(problem: Problem) -> Tensor:
    fp8_backend.quantise_weight, fp8_backend.quantise_transposed = quantise_weight, quantise_transposed
    return ours("fp8", problem)


def _with_weights_before() -> Callable[[Problem], Tensor]:
    """`fp8` whose weights are quantised by the first call, for one problem; each call's backward has to follow it at once."""
    made: dict = {}

    def once(quantise: Callable, weight: Tensor, *scales: Tensor):
        key = (quantise.__name__, weight.data_ptr())
        if key not in made:
            made[key] = quantise(weight, *scales)
        return made[key]

    def run(problem: Problem) -> Tensor:
        for quantise in (quantise_weight, quantise_transposed):
            setattr(fp8_backend, quantise.__name__, functools.partial(once, quantise))
        return ours("fp8", problem)

    return run


def errors_of(function: Callable[[Problem], Tensor], problem: Problem, expected: tuple[Tensor, ...]) -> str:
    """The relative error of the output and of each gradient."""
    found = gradients(function, problem)
    each = (float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
    return " ".join(f"{name} {error:.2e}" for name, error in zip(OUTPUTS, each, strict=True))


def kernels_of(function: Callable[[], object], runs: int = 5) -> list[tuple[str, float, float]]:
    """`(kernel, ms per call of the function, launches)`, the longest first."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            function()
        torch.cuda.synchronize()
    found = [(each.key, each.device_time_total / 1e3 / runs, each.count / runs) for each in profile.key_averages()]
    return sorted((each for each in found if each[1] > 0.004), key=lambda each: -each[1])


def rows_of(name: str, tokens: int, check_tokens: int, routing: str, milliseconds: int):
    checked = make_problem(SHAPES[name], check_tokens, routing)
    expected = exact_layer(checked)
    errors = {option: errors_of(run, checked, expected) for option, run in options().items()}
    print(name, routing, "bit-identical runs:", is_repeatable(_fp8, checked, 5), flush=True)
    del checked, expected
    torch.cuda.empty_cache()
    problem, runs = make_problem(SHAPES[name], tokens, routing), options()
    pairs = {option: layer(run, problem) for option, run in runs.items()}
    pairs[WEIGHTS_BEFORE][1]()  # quantises them
    memory = {option: memory_of(run, problem) for option, run in runs.items()}
    timed = {option: tuple(Timed(each, milliseconds) for each in pair) for option, pair in pairs.items()}
    order = [each for pair in timed.values() for each in pair]
    for _ in range(ROUNDS):
        random.shuffle(order)
        for each in order:
            each.round()
    case = {"shape": name, "tokens": tokens, "routing": routing}
    for option, (forward, both) in timed.items():
        yield case | {
            "what": option,
            "ms": round(both.median, 3),
            "forward_ms": round(forward.median, 3),
            "of_bf16": round(timed["triton"][1].median / both.median, 3),
            "saved_mib": round(memory[option][0]),
            "peak_mib": round(memory[option][1]),
            "errors": errors[option],
        }
    for option in ("triton", "fp8"):
        for kernel, ms, calls in kernels_of(pairs[option][1]):
            yield case | {"what": f"{option}: {kernel[:60]}", "ms": round(ms, 3), "calls": calls}


def accumulation_rows():
    """What the tensor cores' own sums add to the error: products of e4m3 numbers against fp64, the result in bf16."""
    for depth in (1024, 2048, 7168, 16384, 65536):
        left, right = (torch.randn(size, depth, device="cuda").mul_(50).to(DTYPE) for size in (256, 512))
        exact = left.double() @ right.double().T
        tiles = torch.tensor([0, depth // BLOCK_M], dtype=torch.int32, device="cuda")
        plan = Plan(*[tiles] * 5)  # one expert, of which nothing but its tiles is read
        one = torch.ones(1, device="cuda")
        found = fp8_product.fp8_weight_gradient(left, right, one, plan, torch.bfloat16)[0].double()
        error, rounding = (float((each - exact).norm() / exact.norm()) for each in (found, exact.bfloat16().double()))
        slope = float((found * exact).sum() / exact.square().sum()) - 1
        yield {
            "what": f"sums over a depth of {depth}",
            "errors": f"error {error:.2e}, of rounding to bf16 alone {rounding:.2e}, smaller by {-slope:.1e}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3", "dsv3_slice"], choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--check-tokens", type=int, default=4096)
    parser.add_argument("--routings", nargs="+", default=["random", "zipf"])
    parser.add_argument("--milliseconds", type=int, default=240, help="of repetitions per figure, all rounds together")
    parser.add_argument("--commit", default="", help="of this code, for the table")
    arguments = parser.parse_args()
    stamp = {"versions": versions(), "commit": arguments.commit}
    print(stamp["versions"])

    def write(row: dict) -> None:
        append(RESULTS, COLUMNS, [row], **stamp)
        print("| " + " | ".join(str(row.get(column, "")) for column in COLUMNS[3:]) + " |", flush=True)

    for row in accumulation_rows():
        write(row)
    for name in arguments.shapes:
        for routing in arguments.routings:
            for row in rows_of(name, arguments.tokens, arguments.check_tokens, routing, arguments.milliseconds):
                write(row)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
