"""Linear layers in FP8 beside those in bf16: forward and backward of the layers of one block, errors, and each kernel.

    python benchmarks/bench_linear_fp8.py --blocks qwen3_30b_attention qwen3_8b_mlp

A block is what `train.precision: fp8` computes in FP8 in one layer of a model: q, k and v of one tensor, and o of another; gate
and up of one, and down. Options: bf16; `fp8`, whose weight gradients are in bf16; `fp8, narrow`, where they are in FP8, too;
where torchao is installed its recipes of the same two kinds, the block compiled, as torchao asks for. All in one process, in
turns, replayed as CUDA graphs on a busy GPU (`bench_moe.Timed`): the host launches the kernels of a block alone more slowly
than they run. Errors against fp32. Appends to results_linear_fp8.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from bench_moe import Timed, versions
from bench_moe_fp8 import in_turns, kernels_of
from result_rows import append
from torch import Tensor, nn

from patchgen.kernels.linear import fp8_linear
from patchgen.kernels.packages import failed_import

RESULTS = Path(__file__).with_name("results_linear_fp8.csv")
COLUMNS = ("date", "versions", "commit", "block", "tokens", "what", "ms", "calls", "forward_ms", "of_bf16", "errors")
Sizes = tuple[tuple[int, tuple[int, ...]], ...]
BLOCKS: dict[str, Sizes] = {  # inputs, and the outputs of the layers that read them
    "qwen3_30b_attention": ((2048, (4096, 512, 512)), (4096, (2048,))),
    "qwen3_8b_attention": ((4096, (4096, 1024, 1024)), (4096, (4096,))),
    "qwen3_8b_mlp": ((4096, (12288, 12288)), (12288, (4096,))),
}
OPTIONS = ("bf16", "fp8", "fp8, narrow")
TORCHAO = {"torchao": "rowwise_with_gw_hp", "torchao, narrow": "rowwise"}
"""Options, and the recipes of torchao that they are."""


class Block:
    """The layers of a block with one set of weights, in the precision of an option."""

    def __init__(self, sizes: Sizes, option: str, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.layers: list[list[nn.Linear]] = []
        for inputs, outputs in sizes:
            group = [nn.Linear(inputs, size, bias=False, device="cuda", dtype=torch.bfloat16) for size in outputs]
            group = [_by_torchao(layer, TORCHAO[option]) for layer in group] if option in TORCHAO else group
            self.layers.append([layer.to(dtype) for layer in group])
            for layer in group if option in ("fp8", "fp8, narrow") else ():
                fp8_linear.convert(layer, narrow_gradient=option == "fp8, narrow")

    def inputs(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        torch.manual_seed(1)
        made = [torch.randn(1, tokens, group[0].in_features, device="cuda") for group in self.layers]
        return [one.bfloat16().to(dtype).requires_grad_() for one in made]

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for group, x in zip(self.layers, inputs, strict=True) for layer in group]

    def both(self, inputs: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        outs = self.forward(inputs)
        weights = [layer.weight for group in self.layers for layer in group]
        return outs, torch.autograd.grad(outs, [*inputs, *weights], grads)


def _by_torchao(layer: nn.Linear, recipe: str) -> nn.Linear:
    from torchao.float8 import Float8LinearConfig  # pyright: ignore[reportMissingImports]  # of one's own
    from torchao.float8.float8_linear import Float8Linear  # pyright: ignore[reportMissingImports]

    return Float8Linear.from_float(layer, Float8LinearConfig.from_recipe_name(recipe))


def options() -> list[str]:
    return [*OPTIONS, *(TORCHAO if failed_import("torchao.float8") is None else ())]


def errors_of(sizes: Sizes, option: str, tokens: int) -> str:
    """The largest relative error of outputs, input gradients and weight gradients against fp32."""
    parts = []
    for dtype, name in ((torch.float32, "bf16"), (torch.bfloat16, option)):
        block = Block(sizes, name, dtype)
        inputs = block.inputs(tokens, dtype)
        torch.manual_seed(2)
        grads = [torch.randn(out.shape, device="cuda").bfloat16().to(dtype) for out in block.forward(inputs)]
        outs, found = block.both(inputs, grads)
        parts.append((outs, found[: len(inputs)], found[len(inputs) :]))
    worst = (
        max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
        for exact, found in zip(*parts, strict=True)
    )
    return " ".join(f"{name} {error:.2e}" for name, error in zip(("out", "x", "weights"), worst, strict=True))


def captured(function: Callable[[], object]) -> Callable[[], None]:
    """Replays the kernels of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def rows_of(name: str, tokens: int, check_tokens: int, milliseconds: int):
    sizes = BLOCKS[name]
    errors = {option: errors_of(sizes, option, check_tokens) for option in options()}
    torch.cuda.empty_cache()
    runs: dict[str, tuple[Callable, Callable]] = {}
    for option in options():
        block = Block(sizes, option)
        if option in TORCHAO:
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
        inputs = block.inputs(tokens)
        grads = [torch.randn_like(out) for out in block.forward(inputs)]

        def forward(block=block, inputs=inputs) -> object:
            return block.forward([x.view_as(x) for x in inputs])  # other tensors: none is quantised already

        def both(block=block, inputs=inputs, grads=grads) -> object:
            return block.both([x.view_as(x) for x in inputs], grads)

        runs[option] = forward, both
    timed = {option: tuple(Timed(captured(each), milliseconds) for each in pair) for option, pair in runs.items()}
    in_turns([each for pair in timed.values() for each in pair])
    case = {"block": name, "tokens": tokens}
    for option, (of_forward, of_both) in timed.items():
        yield case | {
            "what": option,
            "ms": round(of_both.median, 3),
            "forward_ms": round(of_forward.median, 3),
            "of_bf16": round(timed["bf16"][1].median / of_both.median, 3),
            "errors": errors[option],
        }
    for option in options():
        for kernel, ms, calls in kernels_of(runs[option][1]):
            yield case | {"what": f"{option}: {kernel[:90]}", "ms": round(ms, 3), "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--blocks", nargs="+", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--check-tokens", type=int, default=4096)
    parser.add_argument("--milliseconds", type=int, default=240, help="of repetitions per figure, all rounds together")
    parser.add_argument("--commit", default="", help="of this code, for the table")
    arguments = parser.parse_args()
    print(versions())
    for name in arguments.blocks:
        for row in rows_of(name, arguments.tokens, arguments.check_tokens, arguments.milliseconds):
            append(RESULTS, COLUMNS, [row], versions=versions(), commit=arguments.commit)
            print("| " + " | ".join(str(row.get(column, "")) for column in COLUMNS[3:]) + " |", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
