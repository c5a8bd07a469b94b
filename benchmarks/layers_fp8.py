"""Errors by layer against fp32, of the model of `curve_fp8.py` in bf16, in FP8, and with torchao's linear layers in FP8.

    python benchmarks/layers_fp8.py --commit abc                       # on a GPU; `pip install torchao` for its recipes
    python benchmarks/layers_fp8.py --commit abc --table               # anywhere, from the recorded rows

The model is trained in bf16 for some steps; then each option computes held-out batches with these weights, and with the
experts that fp32 selects: one that another rounding selects is no error of arithmetic. Of each layer: the residual stream
behind it, the gradient of that, and the gradients of the weights of its q, k, v and o and of its experts, in the 2-norm of
all batches relative to fp32's. Then the loss: with all layers in an option, and with one of them alone, the others in bf16,
the mean over batches of the difference from fp32 and its standard error. Appends to results_layers_fp8.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.metadata
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import curve_fp8
import torch
from curve_fp8 import Decoder, Layer, Steps, batch
from result_rows import append
from torch import Tensor, nn

RESULTS = Path(__file__).with_name("results_layers_fp8.csv")
COLUMNS = ("date", "versions", "commit", "model", "steps", "option", "layer", "what", "value", "standard_error")
TORCHAO = {"torchao": "rowwise_with_gw_hp", "torchao narrow": "rowwise"}
"""Options whose experts are bf16, and the recipes of torchao that their q, k, v and o have."""
LABELS = {
    "triton": "bf16",
    "fp8": "FP8 experts",
    "triton, linear": "FP8 q, k, v, o",
    "triton, linear narrow": "and their weight gradients",
    "triton, linear but v o": "FP8 q, k",
    "triton, linear but q k o": "FP8 v",
    "triton, linear but q k v": "FP8 o",
    "fp8, linear": "FP8 experts and q, k, v, o",
    "torchao": "torchao q, k, v, o",
    "torchao narrow": "torchao, and their weight gradients",
}
TENSORS = ("stream", "gradient of the stream", "attention's weights", "experts' weights")
EXACT = "reference"


class Fixed(Layer):
    """A layer whose tokens go to the experts that are named, or to those that it selects.

    Attributes:
        chosen: `[T, K]`; None: the layer selects.
        selected: where the last tokens went, `[T, K]`.
    """

    chosen: Tensor | None = None
    selected: Tensor

    def select(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        if self.chosen is None:
            self.selected = super().select(shares)[1]
        else:
            self.selected = self.chosen
        return shares.gather(-1, self.selected), self.selected


def decoder(options: list[str], weights: dict[str, Tensor]) -> Decoder:
    """A model whose layers compute as `options` say."""
    with next(iter(weights.values())).device:
        model = Decoder("triton")
        model.layers = nn.ModuleList(Fixed("triton" if option in TORCHAO else option) for option in options)
    model.load_state_dict(weights)
    for layer, option in zip(layers_of(model), options, strict=True):
        if option in TORCHAO:
            _convert_by_torchao(layer, TORCHAO[option])
        if option == EXACT:
            layer.dtype = torch.float32
    return model


def layers_of(model: Decoder) -> list[Fixed]:
    return [layer for layer in model.layers if isinstance(layer, Fixed)]


def _convert_by_torchao(layer: nn.Module, recipe: str) -> None:
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]  # of one's own
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(layer, config=config, module_filter_fn=lambda _, name: name in set("qkvo"))


def computed(model: Decoder, rows: Tensor, chosen: list[Tensor] | None) -> tuple[float, dict[tuple, Tensor]]:
    """The loss of `rows [B, S + 1]`, and by layer and name what is compared. The model keeps what its layers selected."""
    streams: list[Tensor] = []

    def keep(_module, _inputs, outputs) -> None:
        outputs[0].retain_grad()
        streams.append(outputs[0])

    hooks = [layer.register_forward_hook(keep) for layer in model.layers]
    for number, layer in enumerate(layers_of(model)):
        layer.chosen = None if chosen is None else chosen[number]
    model.zero_grad()
    is_exact = layers_of(model)[0].backend == EXACT
    with contextlib.nullcontext() if is_exact else torch.autocast(rows.device.type, torch.bfloat16):
        loss, _ = model(rows)
    loss.backward()
    for hook in hooks:
        hook.remove()
    found = {}
    for number, (layer, stream) in enumerate(zip(layers_of(model), streams, strict=True)):
        attention = _gradients([getattr(layer, name).weight for name in "qkvo"])
        tensors = stream.detach(), _gradients([stream]), attention, _gradients([layer.gate_up, layer.down])
        found |= {(number, name): tensor.float() for name, tensor in zip(TENSORS, tensors, strict=True)}
    return loss.item(), found


def _gradients(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.grad.flatten() for tensor in tensors if tensor.grad is not None])


def compared(weights: dict[str, Tensor], batches: list[Tensor], options: list[str]) -> Iterator[dict]:
    """One row for each option, layer and tensor, and for each loss."""
    layers = curve_fp8.LAYERS
    exact = decoder([EXACT] * layers, weights)
    everything = {option: decoder([option] * layers, weights) for option in options}
    apart: dict[tuple, float] = defaultdict(float)
    sizes: dict[tuple, float] = defaultdict(float)
    losses: dict[tuple, list[float]] = defaultdict(list)
    selections, exact_losses, others = [], [], []
    for rows in batches:
        loss, expected = computed(exact, rows, None)
        selections.append([layer.selected for layer in layers_of(exact)])
        exact_losses.append(loss)
        for key, tensor in expected.items():
            sizes[key] += float(tensor.double().square().sum())
        for option, model in everything.items():
            loss, found = computed(model, rows, selections[-1])
            losses[option, "all"].append(loss - exact_losses[-1])
            for key, tensor in found.items():
                apart[option, *key] += float((tensor - expected[key]).double().square().sum())
        if "triton" in everything:
            with torch.no_grad(), torch.autocast(rows.device.type, torch.bfloat16):
                for layer in layers_of(everything["triton"]):
                    layer.chosen = None
                everything["triton"](rows)
            own = [layer.selected for layer in layers_of(everything["triton"])]
            others.append([_share_of_others(a, b) for a, b in zip(own, selections[-1], strict=True)])
    del everything, exact
    for option in [option for option in options if option != "triton"]:
        for number in range(layers):
            model = decoder([option if one == number else "triton" for one in range(layers)], weights)
            with torch.no_grad(), torch.autocast(batches[0].device.type, torch.bfloat16):
                for rows, chosen, loss in zip(batches, selections, exact_losses, strict=True):
                    for layer, index in zip(layers_of(model), chosen, strict=True):
                        layer.chosen = index
                    losses[option, number].append(float(model(rows)[0]) - loss)
    for (option, number, name), square in apart.items():
        value = (square / sizes[number, name]) ** 0.5
        yield {"option": option, "layer": number, "what": name, "value": f"{value:.3e}"}
    yield {"option": EXACT, "layer": "all", "what": "loss", "value": f"{statistics.fmean(exact_losses):.5f}"}
    for (option, number), differences in losses.items():
        error = statistics.stdev(differences) / len(differences) ** 0.5
        mean = statistics.fmean(differences)
        values = {"value": f"{mean:.3e}", "standard_error": f"{error:.1e}"}
        yield {"option": option, "layer": number, "what": "loss, minus fp32's", **values}
    for number in range(layers if others else 0):
        share = statistics.fmean(each[number] for each in others)
        yield {"option": "triton", "layer": number, "what": "other experts than fp32", "value": f"{share:.2e}"}


def _share_of_others(found: Tensor, expected: Tensor) -> float:
    """The share of slots whose expert the other does not select for the token, of `[T, K]` both."""
    return float((found[:, :, None] != expected[:, None, :]).all(-1).float().mean())


def trained(steps: int, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The weights after so many steps in bf16, of the learning rates of `curve_fp8.py` for as many."""
    torch.manual_seed(0)
    taken, generator = Steps("triton", steps), torch.Generator().manual_seed(0)
    for _ in range(steps):
        taken.take(batch(data[0], generator))
    return {name: tensor.detach().clone() for name, tensor in taken.model.state_dict().items()}


def print_tables(rows: list[dict]) -> None:
    """One table per tensor, a row for each layer; then the losses."""
    steps = sorted({row["steps"] for row in rows}, key=int)
    for what in (*TENSORS, "loss, minus fp32's"):
        for step in steps:
            cells = {
                (row["layer"], row["option"]): row["value"]
                + (f" ({row['standard_error']})" if row["standard_error"] else "")
                for row in rows
                if row["what"] == what and row["steps"] == step
            }
            options = [option for option in LABELS if any(key[1] == option for key in cells)]
            print(f"\n{what}, {step} steps\n\n| layer | " + " | ".join(LABELS[option] for option in options) + " |")
            print("| --- |" + " --- |" * len(options))
            for layer in sorted({key[0] for key in cells}):
                print(f"| {layer} | " + " | ".join(cells.get((layer, option), "") for option in options) + " |")


def versions() -> str:
    installed = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed += f", torchao {importlib.metadata.version('torchao')}"
    return installed


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[200, 2000], help="of training, a row of tables for each"
    )
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--options", nargs="+", default=list(LABELS), choices=list(LABELS))
    parser.add_argument(
        "--table", action="store_true", help="prints the recorded rows of --commit, and computes nothing"
    )
    parser.add_argument("--commit", default="", help="of this code, for the table")
    arguments = parser.parse_args()
    if arguments.table:
        with RESULTS.open(newline="") as file:
            print_tables([row for row in csv.DictReader(file) if row["commit"] == arguments.commit])
        return
    data = curve_fp8.text()
    stamp = {"versions": versions(), "commit": arguments.commit, "model": curve_fp8.MODEL}
    for steps in arguments.steps:
        weights = trained(steps, data)
        generator = torch.Generator().manual_seed(12345)
        batches = [batch(data[1], generator) for _ in range(arguments.batches)]
        found = list(compared(weights, batches, arguments.options))
        append(RESULTS, COLUMNS, found, steps=str(steps), **stamp)
        print_tables(
            [{"steps": str(steps), "standard_error": "", **row} | {"layer": str(row["layer"])} for row in found]
        )


if __name__ == "__main__":
    main()
