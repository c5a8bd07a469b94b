"""The fused experts against cuBLAS and against other implementations: checks, then times, then prints the table.

    make bench-moe
    python benchmarks/bench_moe.py --shapes qwen3 --tokens 16384 --routings random

With the first of `--routings` and up to `--check-up-to` tokens, every implementation is first compared with an fp32
expert-by-expert reference on the same bf16 inputs (output and all gradients).
Times are medians over rounds in which the options take turns, the L2 emptied before each call. "cublas" is the
time of plain products with the same operations (2 forward, 4 backward; one big weight, no routing, no activation),
measured in the same process. Saved bytes are what the forward leaves allocated, output included.

Operations: 6 R H I forward, 18 R H I forward and backward, with R = T * K rows.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import importlib.metadata
import importlib.util
import math
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor, nn

from patchgen.kernels.fused_moe import fused_moe

RESULTS = Path(__file__).with_name("results.csv")


@dataclass(frozen=True)
class Shape:
    """H hidden size, I expert intermediate size, E experts, K experts per token."""

    hidden: int
    inner: int
    experts: int
    top_k: int


SHAPES = {
    "qwen3": Shape(2048, 768, 128, 8),
    "gpt_oss": Shape(2880, 2880, 32, 4),
    "dsv3_slice": Shape(7168, 2048, 32, 8),
    "mixtral": Shape(4096, 14336, 8, 2),
}


@dataclass(frozen=True)
class Problem:
    """Inputs of one layer: x [T, H], index [T, K], weights [T, K], gate_up [E, 2I, H], down [E, H, I], grad [T, H]."""

    shape: Shape
    x: Tensor
    index: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.weights, self.gate_up, self.down

    @property
    def rows(self) -> int:
        return self.index.numel()

    @property
    def forward_operations(self) -> int:
        return 6 * self.rows * self.shape.hidden * self.shape.inner


def make_problem(shape: Shape, tokens: int, routing: str) -> Problem:
    """Random inputs. `random`: uniform top-k; `zipf`: Gumbel top-k with log-weights -log(rank)."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda").mul_(scale).to(torch.bfloat16)

    scores = torch.rand(tokens, shape.experts, generator=generator, device="cuda")
    if routing == "zipf":
        ranks = torch.arange(1, shape.experts + 1, device="cuda")
        scores = -torch.log(-torch.log(scores)) - torch.log(ranks)
    return Problem(
        shape,
        random(tokens, shape.hidden).requires_grad_(),
        scores.topk(shape.top_k, dim=-1).indices,
        random(tokens, shape.top_k).float().softmax(-1).to(torch.bfloat16).requires_grad_(),
        random(shape.experts, 2 * shape.inner, shape.hidden, scale=shape.hidden**-0.5).requires_grad_(),
        random(shape.experts, shape.hidden, shape.inner, scale=shape.inner**-0.5).requires_grad_(),
        random(tokens, shape.hidden),
    )


# ------------------------------------------------------------------------------------- implementations


def ours(backend: str, problem: Problem) -> Tensor:
    return fused_moe(
        problem.x,
        problem.index,
        problem.weights,
        problem.gate_up,
        problem.down,
        num_experts=problem.shape.experts,
        activation=_SILU,
        backend=backend,
    )


_SILU = nn.SiLU()


@functools.cache
def _experts_module(shape: Shape) -> nn.Module:
    """transformers' own experts module of the shape, without weights."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden, moe_intermediate_size=shape.inner, num_experts=shape.experts, hidden_act="silu"
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        return Qwen3MoeExperts(config)


def transformers_grouped_mm(problem: Problem) -> Tensor:
    module = _experts_module(problem.shape)
    weights = {"gate_up_proj": problem.gate_up, "down_proj": problem.down}
    return torch.func.functional_call(module, weights, (problem.x, problem.index, problem.weights))


def liger(problem: Problem) -> Tensor:
    """With its fixed configurations: tuning takes two minutes or more per shape."""
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")  # read when it is imported
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction  # pyright: ignore[reportMissingImports]

    return LigerFusedMoEFunction.apply(problem.x, problem.gate_up, problem.down, problem.index.int(), problem.weights)


def implementations() -> dict[str, Callable[[Problem], Tensor]]:
    functions = {"transformers": transformers_grouped_mm}
    functions["torch"] = functools.partial(ours, "torch")
    functions["triton"] = functools.partial(ours, "triton")
    if importlib.util.find_spec("sonicmoe"):
        functions["sonic"] = functools.partial(ours, "sonic")
    if importlib.util.find_spec("liger_kernel"):
        functions["liger"] = liger
    return functions


# ----------------------------------------------------------------------------------------------- checks


def gradients(function: Callable[[Problem], Tensor], problem: Problem) -> tuple[Tensor, ...]:
    out = function(problem)
    return out.detach(), *torch.autograd.grad(out, problem.leaves, problem.grad)


def reference(problem: Problem) -> tuple[Tensor, ...]:
    """Output and gradients in fp32 (products in fp32 too), expert by expert."""
    wide = [leaf.detach().float().requires_grad_() for leaf in problem.leaves]
    x, weights, gate_up, down = wide
    out = fused_moe(
        x,
        problem.index,
        weights,
        gate_up,
        down,
        num_experts=problem.shape.experts,
        activation=_SILU,
        backend="reference",
    )
    return out.detach(), *torch.autograd.grad(out, wide, problem.grad.float())


def worst_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest `|found - expected| / |expected|` of output and gradients; NaN counts as infinite."""
    errors = [
        float((a.float() - b).norm() / b.norm()) if bool(torch.isfinite(a).all()) else float("inf")
        for a, b in zip(found, expected, strict=True)
    ]
    return max(errors)


def is_repeatable(function: Callable[[Problem], Tensor], problem: Problem, runs: int) -> bool:
    first = gradients(function, problem)
    return all(
        all(torch.equal(a, b) for a, b in zip(first, gradients(function, problem), strict=True)) for _ in range(runs)
    )


# ---------------------------------------------------------------------------------------------- timing


ROUNDS = 2
"""Every option is timed so often, in random order."""
WARM_UP = 100
"""Milliseconds of calls that do not count, before each round. A GPU that is busy for longer than some 50 ms draws all the
power that it may, and lowers its clock (from 1.98 to 1.45 GHz on an H200); 0 times short bursts instead, after one call."""
REPETITIONS = 4
"""The fewest per round, however long one takes."""


class Timed:
    """One function and its times in milliseconds; the L2 is emptied before each call."""

    def __init__(self, function: Callable[[], object], milliseconds: int, warm_up: int = WARM_UP) -> None:
        self.function, self.times = function, []
        function()
        (once,) = self._run(1)
        self.warm_ups = max(1, math.ceil(warm_up / once))
        self.count = max(REPETITIONS, int(milliseconds / ROUNDS / once))

    def round(self) -> None:
        self.times += self._run(self.warm_ups + self.count)[self.warm_ups :]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def _run(self, count: int) -> list[float]:
        cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in events:
            cache.zero_()
            start.record()
            self.function()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def cublas(problem: Problem) -> tuple[Callable[[], None], Callable[[], None]]:
    """Products with the same operations as one layer, forward and both: two and four more."""
    shape, rows = problem.shape, problem.rows
    x, h = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (shape.hidden, 2 * shape.inner))
    a = torch.randn(rows, shape.inner, device="cuda", dtype=torch.bfloat16)
    gate_up, down = problem.gate_up.detach()[0], problem.down.detach()[0]

    def forward() -> None:
        torch.mm(x, gate_up.T)
        torch.mm(a, down.T)

    def both() -> None:
        forward()
        torch.mm(x, down)
        torch.mm(x.T, a)
        torch.mm(h, gate_up)
        torch.mm(h.T, x)

    return forward, both


def layer(
    function: Callable[[Problem], Tensor], problem: Problem
) -> tuple[Callable[[], object], Callable[[], object]]:
    """An implementation's forward, and its forward with backward."""
    return (
        lambda: function(problem),
        lambda: torch.autograd.grad(function(problem), problem.leaves, problem.grad),
    )


def memory_of(function: Callable[[Problem], Tensor], problem: Problem) -> tuple[float, float]:
    """MiB that the forward leaves allocated, output included, and the peak of forward and backward."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = function(problem)
    torch.cuda.synchronize()
    saved = torch.cuda.memory_allocated() - before
    result = torch.autograd.grad(out, problem.leaves, problem.grad)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del out, result
    return saved / 2**20, peak / 2**20


# ------------------------------------------------------------------------------------------------- main


def versions() -> str:
    names = ("torch", "triton", "transformers", "liger-kernel", "sonic-moe", "quack-kernels", "torchao")
    installed = [f"{name} {importlib.metadata.version(name)}" for name in names if _has(name)]
    return ", ".join([torch.cuda.get_device_name(), f"cuda {torch.version.cuda}", *installed])


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


COLUMNS = [
    "date",
    "benchmark",
    "versions",
    "shape",
    "tokens",
    "routing",
    "option",
    "forward_ms",
    "both_ms",
    "forward_tflops",
    "both_tflops",
    "forward_of_cublas",
    "both_of_cublas",
    "saved_mib",
    "peak_mib",
    "worst_relative_error",
    "warm_up",
]


def rows_of(name: str, tokens: int, routing: str, options: list[str], milliseconds: int, warm_up: int, check: bool):
    """One dictionary per option, printed when all are measured."""
    problem = make_problem(SHAPES[name], tokens, routing)
    expected = reference(problem) if check else None
    errors, memory = {}, {"cublas": (0.0, 0.0)}
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {"cublas": cublas(problem)}
    for option in options:
        function = implementations()[option]
        errors[option] = worst_error(gradients(function, problem), expected) if expected is not None else None
        memory[option] = memory_of(function, problem)
        pairs[option] = layer(function, problem)
    del expected
    forward, both = (
        {option: Timed(pair[place], milliseconds, warm_up) for option, pair in pairs.items()} for place in (0, 1)
    )
    order = [*forward.values(), *both.values()]
    for _ in range(ROUNDS):
        random.shuffle(order)
        for timed in order:
            timed.round()
    operations = problem.forward_operations
    for option in pairs:
        forward_ms, both_ms = forward[option].median, both[option].median
        error = errors.get(option)
        row = {
            "shape": name,
            "tokens": tokens,
            "routing": routing,
            "option": option,
            "forward_ms": round(forward_ms, 3),
            "both_ms": round(both_ms, 3),
            "forward_tflops": round(operations / forward_ms / 1e9),
            "both_tflops": round(3 * operations / both_ms / 1e9),
            "forward_of_cublas": round(forward["cublas"].median / forward_ms, 3),
            "both_of_cublas": round(both["cublas"].median / both_ms, 3),
            "saved_mib": round(memory[option][0]),
            "peak_mib": round(memory[option][1]),
            "worst_relative_error": "" if error is None else f"{error:.1e}",
            "warm_up": f"{warm_up} ms" if warm_up else "one call",
        }
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 4096, 32768])
    parser.add_argument("--routings", nargs="+", default=["random", "zipf"])
    parser.add_argument("--options", nargs="+", default=None, help="default: every one that is installed")
    parser.add_argument("--milliseconds", type=int, default=120, help="of repetitions per figure, all rounds together")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="milliseconds before each round; 0: one call")
    parser.add_argument("--check-up-to", type=int, default=16384, help="tokens up to which errors are computed")
    parser.add_argument("--repeat", type=int, default=20, help="runs that must agree bit for bit")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    options = arguments.options or list(implementations())

    print(versions())
    print("| " + " | ".join(COLUMNS[3:]) + " |\n|" + " --- |" * len(COLUMNS[3:]))
    new_file = not arguments.results.exists()
    with arguments.results.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new_file:
            writer.writeheader()
        stamp = {"date": datetime.date.today().isoformat(), "benchmark": "moe", "versions": versions()}
        for tokens in arguments.tokens:
            for name in arguments.shapes:
                for routing in arguments.routings:
                    check = tokens <= arguments.check_up_to and routing == arguments.routings[0]
                    for row in rows_of(
                        name, tokens, routing, options, arguments.milliseconds, arguments.warm_up, check
                    ):
                        writer.writerow(stamp | row)
                        file.flush()  # an option may outlast the time limit
                    torch.cuda.empty_cache()
    if "triton" in options:
        problem = make_problem(SHAPES["qwen3"], 4096, "zipf")
        repeatable = is_repeatable(functools.partial(ours, "triton"), problem, arguments.repeat)
        print(f"triton, {arguments.repeat} runs bit-identical: {repeatable} (triton {triton.__version__})")


if __name__ == "__main__":
    main()
