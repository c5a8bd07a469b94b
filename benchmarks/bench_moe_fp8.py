"""The experts in FP8 beside those in bf16: errors, times of the layer and of each kernel, memory.

    python benchmarks/bench_moe_fp8.py --shapes qwen3 dsv3_slice

Options: `triton` is bf16; `fp8` quantises its weights in each forward and backward; `fp8, rows before` finds the rows that
AdamW has written, as a training run with one micro-batch per step does, and transposes them; `fp8, weights before` finds both
orientations, as all micro-batches of a step but the first; `fp8_wide_gradients` computes weight gradients in bf16. All in one
process, in turns, on a busy GPU (`bench_moe.Timed`); errors against fp32, expert by expert, at `--check-tokens`. Then what
the weights of a layer cost outside of it: AdamW with and without rows, and each form. Appends to results_moe_fp8.csv.
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

from patchgen.kernels.moe import fp8_kept, fp8_product
from patchgen.kernels.moe.fp8_values import DTYPE, quantise_transposed, quantise_weight, transpose_quantised
from patchgen.kernels.moe.plan import BLOCK_M, Plan
from patchgen.kernels.optimizer.adamw import adamw_

RESULTS = Path(__file__).with_name("results_moe_fp8.csv")
COLUMNS = ("date", "versions", "commit", "shape", "tokens", "routing", "what", "ms", "calls", "forward_ms", "of_bf16",
           "saved_mib", "peak_mib", "errors")  # fmt: skip
OUTPUTS = ("out", "x", "weights", "gate_up", "down")
WIDE = "fp8_wide_gradients, rows before"
ROWS_BEFORE, WEIGHTS_BEFORE = "fp8, rows before", "fp8, weights before"


def options() -> dict[str, Callable[[Problem], Tensor]]:
    return {
        "triton": functools.partial(ours, "triton"),
        "fp8": _fp8,
        ROWS_BEFORE: functools.partial(_kept, False),
        WEIGHTS_BEFORE: functools.partial(_kept, True),
        WIDE: functools.partial(_kept, False, backend="fp8_wide_gradients"),
    }


_forms: list[fp8_kept.KeptForms] = []
"""Of the weights of the problem that was last run by one of two options."""


def _fp8(problem: Problem) -> Tensor:
    _forms.clear()
    return ours("fp8", problem)


def _kept(transposed: bool, problem: Problem, backend: str = "fp8") -> Tensor:
    """`fp8` that finds what a call before it has kept."""
    weights = problem.gate_up, problem.down
    is_known = [forms.tensor.data_ptr() for forms in _forms] == [weight.data_ptr() for weight in weights]
    if not is_known or _forms[0].keeps_transposed != transposed:
        _forms[:] = [fp8_kept.keep(weight.detach(), transposed=transposed) for weight in weights]
    return ours(backend, problem)


def weight_rows(problem: Problem, milliseconds: int):
    """What both weights of a layer cost: AdamW of fp32 parameters with bf16 gradients, and each form in FP8."""
    weights = [problem.gate_up.detach(), problem.down.detach()]
    rows = [quantise_weight(weight) for weight in weights]
    transposed = [
        (quantise_transposed(weight, row.scales), transpose_quantised(row))
        for weight, row in zip(weights, rows, strict=True)
    ]
    is_same = all(
        torch.equal(left.values.view(torch.uint8), right.values.view(torch.uint8)) for left, right in transposed
    )
    del transposed
    states = [
        [weight.float(), weight * 1e-3, weight.float() * 0, weight.float() * 0, weight.clone()] for weight in weights
    ]

    def adamw(writes_rows: bool) -> None:
        for (*state, copy), row in zip(states, rows, strict=True):
            adamw_(*state, step=2, lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, copy=copy,
                   rows=row if writes_rows else None)  # fmt: skip

    def each(function: Callable, *lists: list) -> None:
        for arguments in zip(*lists, strict=True):
            function(*arguments)

    timed = {
        "AdamW": lambda: adamw(False),
        "AdamW, with rows": lambda: adamw(True),
        "quantise_weight": lambda: each(quantise_weight, weights),
        "quantise_transposed": lambda: each(quantise_transposed, weights, [row.scales for row in rows]),
        "transpose_quantised": lambda: each(transpose_quantised, rows),
    }
    timed = {name: Timed(function, milliseconds) for name, function in timed.items()}
    in_turns(list(timed.values()))
    for name, one in timed.items():
        note = f"same bits as of the weight: {is_same}" if name == "transpose_quantised" else ""
        yield {"what": f"both weights: {name}", "ms": round(one.median, 3), "errors": note}


def in_turns(timed: list[Timed]) -> None:
    for _ in range(ROUNDS):
        random.shuffle(timed)
        for each in timed:
            each.round()


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
    memory = {}
    for option, run in runs.items():
        pairs[option][1]()  # what it keeps is there
        memory[option] = memory_of(run, problem)
    timed = {option: tuple(Timed(each, milliseconds) for each in pair) for option, pair in pairs.items()}
    in_turns([each for pair in timed.values() for each in pair])
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
    for option in ("triton", "fp8", ROWS_BEFORE, WIDE):
        for kernel, ms, calls in kernels_of(pairs[option][1]):
            yield case | {"what": f"{option}: {kernel[:60]}", "ms": round(ms, 3), "calls": calls}
    if routing == "random":
        _forms.clear()
        for row in weight_rows(problem, milliseconds):
            yield case | row


def accumulation_rows():
    """What the sums add to the error: products of e4m3 numbers of random and of one sign against fp64, the result in bf16."""
    for signs in ("random", "one"):
        for depth in (512, 2048, 7168, 16384, 65536):
            left, right = (torch.randn(size, depth, device="cuda").mul_(50) for size in (256, 512))
            if signs == "one":
                left, right = left.abs(), right.abs()
            left, right = left.to(DTYPE), right.to(DTYPE)
            exact = left.double() @ right.double().T
            tiles = torch.tensor([0, depth // BLOCK_M], dtype=torch.int32, device="cuda")
            plan = Plan(tiles, tiles, tiles, tiles, tiles[None])  # one expert, of which nothing but its tiles is read
            one = torch.ones(1, device="cuda")
            found = fp8_product.fp8_weight_gradient(left, right, one, plan, torch.bfloat16)[0].double()
            error, rounding = (
                float((each - exact).norm() / exact.norm()) for each in (found, exact.bfloat16().double())
            )
            slope = float((found * exact).sum() / exact.square().sum()) - 1
            yield {
                "what": f"sums of {signs} sign over a depth of {depth}",
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
