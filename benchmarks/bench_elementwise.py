"""Norm, rotary embedding and SwiGLU: upstream's formulas, the same compiled, and other packages' kernels.

    make bench-elementwise
    python benchmarks/bench_elementwise.py --tokens 32768 --options eager compiled

Sizes of Qwen3-30B-A3B (H 2048, 32 query and 4 key heads of 128) and of a dense layer (I 6144), bf16. Times are medians of
`triton.testing.do_bench`. The error is the worst of outputs and gradients against the eager formula in fp32. Rates
count what a pass must read and write once.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from bench_moe import RESULTS, versions
from torch import Tensor, nn
from triton.testing import do_bench

from patchgen.kernels.elementwise import formulas

COLUMNS = [
    "date",
    "benchmark",
    "versions",
    "tokens",
    "operation",
    "option",
    "forward_ms",
    "both_ms",
    "forward_gb_s",
    "both_gb_s",
    "worst_relative_error",
]
EPS = 1e-6


def median_ms(function: Callable[[], object], milliseconds: int) -> float:
    """The median time of a call, over so many milliseconds of repetitions, at least ten calls."""

    def measured(warm_up: int, repetitions: int) -> float:
        median = do_bench(function, warmup=warm_up, rep=repetitions, return_mode="median")
        assert isinstance(median, float)  # a list for quantiles alone
        return median

    return measured(0, max(milliseconds, int(10 * measured(25, 1))))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def norm_inputs(tokens: int) -> list[Tensor]:
    return [random(1, tokens, 2048).requires_grad_(), random(2048).requires_grad_()]


def head_norm_inputs(tokens: int) -> list[Tensor]:
    return [random(1, tokens, 32, 128).requires_grad_(), random(128).requires_grad_()]


def rotary_inputs(tokens: int) -> list[Tensor]:
    """Query and key as a projection leaves them, heads moved forward; cos and sin of the positions."""
    angle = torch.arange(tokens, device="cuda").float()[:, None] * 1e-4 ** (torch.arange(64, device="cuda") / 64)
    angle = torch.cat([angle, angle], -1)[None]
    query, key = (random(1, tokens, heads, 128).transpose(1, 2).requires_grad_() for heads in (32, 4))
    return [query, key, angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)]


def swiglu_inputs(tokens: int) -> list[Tensor]:
    return [random(1, tokens, 6144).requires_grad_(), random(1, tokens, 6144).requires_grad_()]


INPUTS = {"rms_norm": norm_inputs, "head_norm": head_norm_inputs, "rotary": rotary_inputs, "swiglu": swiglu_inputs}


def implementations(operation: str) -> dict[str, Callable]:
    if operation == "swiglu":
        found = {
            "eager": functools.partial(formulas.gated_activation, activation=_SILU),
            "compiled": functools.partial(formulas.gated_activation_compiled, activation=_SILU),
        }
    elif operation == "rotary":
        found = {"eager": formulas.rotary, "compiled": formulas.rotary_compiled}
    else:
        found = {
            "eager": functools.partial(formulas.rms_norm, eps=EPS),
            "compiled": functools.partial(formulas.rms_norm_compiled, eps=EPS),
        }
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import functional  # pyright: ignore[reportMissingImports]

        norm = functools.partial(functional.liger_rms_norm, eps=EPS, in_place=False)
        liger = {"rotary": functional.liger_rope, "swiglu": functional.liger_swiglu}
        found["liger"] = liger.get(operation, norm)
    if importlib.util.find_spec("quack") and operation.endswith("norm"):
        from quack.rmsnorm import rmsnorm  # pyright: ignore[reportMissingImports]

        found["quack"] = functools.partial(rmsnorm, eps=EPS)
    return found


_SILU = nn.SiLU()


def run_both(function: Callable, inputs: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
    """Outputs and gradients."""
    out = function(*inputs)
    outputs = list(out) if isinstance(out, tuple) else [out]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    return *outputs, *torch.autograd.grad(outputs, leaves, gradients)


def measure(operation: str, option: str, function: Callable, inputs: list[Tensor], milliseconds: int) -> dict:
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    moved = sum(tensor.numel() for tensor in leaves) * 2  # bytes
    out = implementations(operation)["eager"](*inputs)
    outputs = list(out) if isinstance(out, tuple) else [out]
    gradients = [random(*tensor.shape) for tensor in outputs]
    results = sum(tensor.numel() for tensor in outputs) * 2
    del out, outputs

    def fresh(dtype: torch.dtype) -> list[Tensor]:  # some kernels write into their inputs
        return [
            tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)
            if tensor.dtype == torch.bfloat16
            else tensor
            for tensor in inputs
        ]

    exact = run_both(implementations(operation)["eager"], fresh(torch.float32), [g.float() for g in gradients])
    results_bf16 = run_both(function, fresh(torch.bfloat16), [g.clone() for g in gradients])
    error = max(
        float((a.detach().float() - b.detach()).norm() / b.norm()) for a, b in zip(results_bf16, exact, strict=True)
    )
    del exact, results_bf16
    forward = median_ms(lambda: function(*inputs), milliseconds)
    both = median_ms(lambda: run_both(function, inputs, gradients), milliseconds)
    return {
        "operation": operation,
        "option": option,
        "forward_ms": round(forward, 4),
        "both_ms": round(both, 4),
        "forward_gb_s": round((moved + results) / forward / 1e6),
        # backward: inputs and the gradients of the outputs are read, those of the inputs written
        "both_gb_s": round((3 * moved + 2 * results) / both / 1e6),
        "worst_relative_error": f"{error:.1e}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--operations", nargs="+", choices=list(INPUTS), default=list(INPUTS))
    parser.add_argument("--options", nargs="+", default=None, help="default: every one that is installed")
    parser.add_argument("--milliseconds", type=int, default=60, help="of repetitions per figure")
    parser.add_argument("--results", type=Path, default=RESULTS.with_name("results_elementwise.csv"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    new_file = not arguments.results.exists()
    with arguments.results.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new_file:
            writer.writeheader()
        for tokens in arguments.tokens:
            for operation in arguments.operations:
                inputs = INPUTS[operation](tokens)
                for option, function in implementations(operation).items():
                    if arguments.options and option not in arguments.options:
                        continue
                    row = {
                        "date": datetime.date.today().isoformat(),
                        "benchmark": "elementwise",
                        "versions": versions(),
                        "tokens": tokens,
                        **measure(operation, option, function, inputs, arguments.milliseconds),
                    }
                    print("| " + " | ".join(str(row[column]) for column in COLUMNS[3:]) + " |", flush=True)
                    writer.writerow(row)


if __name__ == "__main__":
    main()
