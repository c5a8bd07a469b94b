"""Head and cross-entropy of a language model: time and memory of the ways to compute them, forward and backward.

    python benchmarks/bench_loss.py
    python benchmarks/bench_loss.py --tokens 8192 --options chunked linear

V = 151,936, H = 2048, bf16, one sequence of 8k and of 32k tokens. Times are medians of `triton.testing.do_bench`; the
peak counts what a run allocates above its inputs, gradients of hidden states and weight included. The error is the
worse one of the gradients of hidden states and weight, against the chunked loss in fp32.
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
from bench_elementwise import median_ms
from bench_moe import RESULTS, versions
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from patchgen.kernels.loss.causal_lm_loss import chunked_causal_lm_loss
from patchgen.kernels.loss.linear_cross_entropy import linear_causal_lm_loss

COLUMNS = [
    "date",
    "benchmark",
    "versions",
    "tokens",
    "option",
    "both_ms",
    "tflops",
    "peak_gib",
    "worst_relative_error",
]
VOCAB_SIZE, HIDDEN_SIZE = 151_936, 2048


def upstream(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return ForCausalLMLoss(head(hidden), labels, VOCAB_SIZE)


def chunked(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return chunked_causal_lm_loss(head, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=VOCAB_SIZE)[1]


def linear(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return linear_causal_lm_loss(head, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=VOCAB_SIZE)[1]


def liger(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # pyright: ignore[reportMissingImports]

    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return liger_fused_linear_cross_entropy(hidden.reshape(-1, HIDDEN_SIZE), head.weight, shifted)


def quack(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy  # pyright: ignore[reportMissingImports]

    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return chunked_linear_cross_entropy(hidden.reshape(-1, HIDDEN_SIZE), head.weight, shifted)


def options() -> dict[str, Callable]:
    functions = {
        "upstream": upstream,
        "upstream compiled": torch.compile(upstream),
        "chunked": chunked,
        "linear": linear,
    }
    if importlib.util.find_spec("liger_kernel"):
        functions["liger"] = liger
    if importlib.util.find_spec("quack"):
        functions["quack"] = quack
    return functions


def gradients(function: Callable, head: nn.Linear, hidden: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(head, hidden, labels), [hidden, head.weight])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--options", nargs="+", choices=list(options()), default=list(options()))
    parser.add_argument("--results", type=Path, default=RESULTS.with_name("results_loss.csv"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False, device="cuda", dtype=torch.bfloat16)
    new_file = not arguments.results.exists()
    with arguments.results.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new_file:
            writer.writeheader()
        for tokens in arguments.tokens:
            hidden = torch.randn(1, tokens, HIDDEN_SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            labels = torch.randint(0, VOCAB_SIZE, (1, tokens), device="cuda")
            wide = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False, device="cuda")
            wide.weight.data.copy_(head.weight)
            exact = gradients(chunked, wide, hidden.detach().float().requires_grad_(), labels)
            del wide
            for name in arguments.options:
                function = options()[name]
                run = functools.partial(gradients, function, head, hidden, labels)
                computed = run()
                error = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(computed, exact, strict=True))
                del computed
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run()
                torch.cuda.synchronize()
                peak = (torch.cuda.max_memory_allocated() - before) / 2**30
                milliseconds = median_ms(run, 200)
                row = {
                    "date": datetime.date.today().isoformat(),
                    "benchmark": "loss",
                    "versions": versions(),
                    "tokens": tokens,
                    "option": name,
                    "both_ms": round(milliseconds, 2),
                    "tflops": round(6 * tokens * HIDDEN_SIZE * VOCAB_SIZE / milliseconds / 1e9),
                    "peak_gib": round(peak, 2),
                    "worst_relative_error": f"{error:.1e}",
                }
                print("| " + " | ".join(str(row[column]) for column in COLUMNS[3:]) + " |", flush=True)
                writer.writerow(row)


if __name__ == "__main__":
    main()
