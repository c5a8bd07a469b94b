"""What the products of a language model's head would gain in FP8, and what the loss would move by.

    python benchmarks/bench_head_fp8.py                                   # on a GPU
    python benchmarks/bench_head_fp8.py --vocabulary 1024 --tokens 64     # anywhere: the loss alone, by the reference

Times of one chunk of tokens, in turns on a busy GPU: the products in bf16 and in FP8, and what FP8 adds once per step or per
chunk. Losses against fp32 with random weights: as they start, and with logits of a trained model's deviation, whose labels are
drawn from the model itself; "peaked" lets three quarters of the tokens lean to one row. Appends to results_head_fp8.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from bench_moe import Timed, versions
from bench_moe_fp8 import in_turns
from result_rows import append
from torch import Tensor
from torch.nn import functional as F

RESULTS = Path(__file__).with_name("results_head_fp8.csv")
COLUMNS = ("date", "versions", "commit", "vocabulary", "hidden", "tokens", "what", "ms", "loss", "bf16", "fp8", "rms")
LOGITS = {"as initialised": (0.9, 0.0), "deviation 3": (3.0, 0.0), "deviation 4.5": (4.5, 0.0), "peaked": (3.0, 0.09)}
"""The deviation of logits, and how far tokens lean to a row."""

if torch.cuda.is_available():
    from patchgen.kernels.linear import fp8_products as products

    DEVICE = "cuda"
else:
    from patchgen.kernels.linear import fp8_reference as products

    DEVICE = "cpu"


def time_rows(vocabulary: int, hidden: int, tokens: int, milliseconds: int):
    """ms of each product and of each conversion."""
    x, weight, grads = (
        torch.randn(shape, device=DEVICE).mul_(scale).bfloat16()
        for shape, scale in (((tokens, hidden), 1), ((vocabulary, hidden), 0.02), ((tokens, vocabulary), 1e-6))
    )
    sums = torch.zeros(vocabulary, hidden, device=DEVICE)
    rows, weight_rows, grad_rows = products.rows(x), products.rows(weight), products.rows(grads)
    other = products.other_side(weight, weight_rows[1])
    functions: dict[str, Callable[[], object]] = {
        "logits, bf16": lambda: x @ weight.t(),
        "logits, FP8": lambda: products.product(*rows, *weight_rows, None, torch.bfloat16),
        "input's gradient, bf16": lambda: grads @ weight,
        "input's gradient, FP8": lambda: products.product(*grad_rows, *other, None, torch.bfloat16),
        "weight's gradient, bf16": lambda: torch.addmm(sums, grads.t(), x, out_dtype=torch.float32, out=sums),
        "tokens to FP8": lambda: products.rows(x),
        "gradient of logits to FP8, in a pass of its own": lambda: products.rows(grads),
        "weight to FP8, once": lambda: products.rows(weight),
        "weight's other side, once": lambda: products.other_side(weight, weight_rows[1]),
    }
    timed = {what: Timed(function, milliseconds) for what, function in functions.items()}
    in_turns(list(timed.values()))
    for what, one in timed.items():
        yield {"what": what, "ms": round(one.median, 3)}


def loss_rows(vocabulary: int, hidden: int, tokens: int):
    """The mean loss in fp32, how far it is from that in bf16 and in FP8, relatively, and the latter by token (2-norm mean)."""
    for name, (deviation, lean) in LOGITS.items():
        scale = deviation * hidden**-0.5
        weight, x = (torch.randn(size, hidden, device=DEVICE) for size in (vocabulary, tokens))
        weight = (weight * scale).bfloat16()
        leaning = torch.arange(tokens, device=DEVICE) < (3 * tokens // 4 if lean else 0)
        rows_of = weight[torch.randint(vocabulary, (tokens,), device=DEVICE)].float() / scale
        x = x + lean * leaning[:, None] * rows_of
        x = (x / x.square().mean(1, keepdim=True).sqrt()).bfloat16()
        exact, bf16, fp8 = losses(x, weight)
        yield {
            "what": f"loss, {name}",
            "loss": round(float(exact.mean()), 5),
            "bf16": f"{float((bf16.mean() - exact.mean()) / exact.mean()):.2e}",
            "fp8": f"{float((fp8.mean() - exact.mean()) / exact.mean()):.2e}",
            "rms": round(float((fp8 - exact).square().mean().sqrt()), 3),
        }


def losses(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By token in fp32, bf16 and FP8, of labels drawn from the first."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    weight_rows = products.rows(weight)
    for part in x.split(1024):
        logits = (
            part.float() @ weight.float().t(),
            part @ weight.t(),
            products.product(*products.rows(part), *weight_rows, None, torch.bfloat16),
        )
        labels = logits[0].softmax(-1).multinomial(1)[:, 0]
        exact, bf16, fp8 = (F.cross_entropy(each.float(), labels, reduction="none") for each in logits)
        found.append((exact, bf16, fp8))
    exact, bf16, fp8 = (torch.cat(each) for each in zip(*found, strict=True))
    return exact, bf16, fp8


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--milliseconds", type=int, default=80, help="of repetitions per figure, all rounds together")
    parser.add_argument("--commit", default="", help="of this code, for the table")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes = arguments.vocabulary, arguments.hidden, arguments.tokens
    common = dict(zip(("vocabulary", "hidden", "tokens"), sizes, strict=True))
    rows = [*(time_rows(*sizes, arguments.milliseconds) if DEVICE == "cuda" else ()), *loss_rows(*sizes)]
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "")) for column in COLUMNS[6:]) + " |", flush=True)
    if DEVICE == "cuda":
        append(RESULTS, COLUMNS, [common | row for row in rows], versions=versions(), commit=arguments.commit)


if __name__ == "__main__":
    main()
