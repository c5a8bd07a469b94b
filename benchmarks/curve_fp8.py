"""The loss of a small model with experts in FP8 beside the same in bf16: several seeds each, the same batches for all.

    python benchmarks/curve_fp8.py --steps 2000 --seeds 0 1 2 --commit abc      # on a GPU
    python benchmarks/curve_fp8.py --commit abc --picture docs/fp8_loss.png     # anywhere, from the recorded rows

A decoder of bytes over the text of Python's standard library, every eleventh file of it held out. Everything but the experts,
and the linear layers of attention in some, is bf16 in all; parameters and AdamW are fp32. Steps are replayed as a CUDA graph
after the first three. Appends the losses to results_curve_fp8.csv. `--picture` draws them and prints what they are compared
by: the difference of the means from those of bf16 and the spread over seeds.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sysconfig
import time
from pathlib import Path

import torch
from result_rows import append
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.kernels.fused_moe import fused_moe
from patchgen.kernels.linear import fp8_linear

RESULTS = Path(__file__).with_name("results_curve_fp8.csv")
COLUMNS = ("date", "versions", "commit", "model", "experts", "seed", "step", "loss", "held_out", "seconds")
HIDDEN, INNER, EXPERTS, TOP_K, LAYERS, HEADS = 768, 384, 32, 4, 6, 12
ROWS, LENGTH, VOCABULARY = 16, 1024, 256
LABELS = {
    "triton": "bf16",
    "fp8": "FP8 experts",
    "fp8_wide_gradients": "FP8 experts, weight gradients in bf16",
    "fp8, linear": "FP8 experts and q, k, v, o",
    "fp8, linear but q k": "FP8 experts and v, o",
    "fp8, linear but o": "FP8 experts and q, k, v",
    "fp8, linear but q k v": "FP8 experts and o",
    "fp8, linear narrow": "FP8 experts and q, k, v, o with their weight gradients",
    "fp8, linear but layers 1 2": "FP8 experts and q, k, v, o but for layers 1 and 2",
}
"""Experts' kernels, and which linear layers of attention are in FP8, all of them as `train.precision: fp8` has them."""
DEFAULT = ("triton", "fp8", "fp8, linear", "fp8, linear but q k", "fp8, linear but o", "fp8, linear but q k v")
WARM_UP_STEPS = 3
"""That are taken one by one, before the graph is captured."""
WINDOW = 50
"""Steps whose losses are averaged, and batches that the held-out loss is measured on."""
SMOOTHED = 5
"""Windows that a point of the picture's differences averages."""
MODEL = f"H {HIDDEN}, I {INNER}, E {EXPERTS}, k {TOP_K}, {LAYERS} layers, {ROWS} x {LENGTH} bytes a step"


class Layer(nn.Module):
    """One layer of the decoder.

    Attributes:
        dtype: of the norms' outputs and of what experts compute.
    """

    dtype = torch.bfloat16

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend, self.act = backend.partition(",")[0], nn.SiLU()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        _, in_fp8, left_out = backend.partition(", linear")
        for name in [name for name in "qkvo" if in_fp8 and name not in left_out.partition("but")[2].split()]:
            fp8_linear.convert(getattr(self, name), narrow_gradient=left_out == " narrow")
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * (2 * LAYERS * INNER) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x [B, S, H]` and the loss that balances the router."""
        normed = self.norms[0](x).to(self.dtype)
        q, k, v = (linear(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(mixed)
        tokens = self.norms[1](x).flatten(0, 1).to(self.dtype)
        shares = self.router(tokens).float().softmax(-1)
        weights, index = self.select(shares)
        weights = (weights / weights.sum(-1, keepdim=True)).to(self.dtype)
        stacks = self.gate_up.to(self.dtype), self.down.to(self.dtype)
        out = fused_moe(
            tokens, index, weights, *stacks, num_experts=EXPERTS, activation=self.act, backend=self.backend
        )
        load = F.one_hot(index, EXPERTS).sum((0, 1)) / index.numel()
        return x + out.view_as(x), EXPERTS * (load * shares.mean(0)).sum()

    def select(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """The shares and the indices of a token's experts, of `shares [T, E]`."""
        return shares.topk(TOP_K, dim=-1)


def _of_layer(backend: str, number: int) -> str:
    """The option of one layer: without FP8 in its linear layers if it is left out."""
    everywhere, _, left_out = backend.partition(" but layers ")
    return everywhere.partition(",")[0] if str(number) in left_out.split() else everywhere


class Decoder(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Layer(_of_layer(backend, number)) for number in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of `rows [B, S + 1]` and that of the routers."""
        x = self.embed(rows[:, :-1]) + self.places.weight
        balance = x.new_zeros(())
        for layer in self.layers:
            x, of_layer = layer(x)
            balance = balance + of_layer / LAYERS
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), balance


def text() -> tuple[Tensor, Tensor]:
    """The bytes to train on and those that are held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = [file for file in files if "site-packages" not in file.parts]
    trained, held_out = bytearray(), bytearray()
    for number, file in enumerate(files):
        (held_out if number % 11 == 0 else trained).extend(file.read_bytes())
    return torch.frombuffer(trained, dtype=torch.uint8).cuda(), torch.frombuffer(held_out, dtype=torch.uint8).cuda()


def batch(data: Tensor, generator: torch.Generator) -> Tensor:
    start = torch.randint(len(data) - LENGTH - 1, (ROWS, 1), generator=generator).cuda()
    return data[start + torch.arange(LENGTH + 1, device="cuda")].long()


class Steps:
    """Training steps, one by one at first and then replayed."""

    def __init__(self, backend: str, steps: int) -> None:
        self.model, self.steps, self.step = Decoder(backend).cuda(), steps, 0
        self.learning_rate = torch.zeros((), device="cuda")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            self.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
            capturable=True,
        )
        self.rows = torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64, device="cuda")
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def take(self, rows: Tensor) -> Tensor:
        """The loss of `rows [B, S + 1]` before the step."""
        self.learning_rate.fill_(6e-4 * min((self.step + 1) / 100, 1) * (1 - 0.9 * self.step / self.steps))
        self.rows.copy_(rows)
        if self.step < WARM_UP_STEPS:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.optimizer.zero_grad()
                self.update()
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            if self.step == WARM_UP_STEPS:
                self.optimizer.zero_grad()
                with torch.cuda.graph(self.graph):
                    self.update()
            self.graph.replay()
        self.step += 1
        return self.loss.clone()

    def update(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss, balance = self.model(self.rows)
        (loss + 0.01 * balance).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss = loss.detach()


def train(backend: str, seed: int, steps: int, data: tuple[Tensor, Tensor]) -> list[dict]:
    """One row per `WINDOW` steps, with the mean loss of these steps; the last one with the held-out loss."""
    torch.manual_seed(seed)
    taken, generator = Steps(backend, steps), torch.Generator().manual_seed(seed)
    rows, losses, started = [], [], time.time()
    for step in range(1, steps + 1):
        losses.append(taken.take(batch(data[0], generator)))
        if step % WINDOW == 0:
            rows.append({"experts": backend, "seed": seed, "step": step, "loss": float(torch.stack(losses).mean())})
            losses = []
    rows[-1]["seconds"] = round(time.time() - started)
    generator = torch.Generator().manual_seed(12345)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        held_out = [taken.model(batch(data[1], generator))[0] for _ in range(WINDOW)]
    rows[-1]["held_out"] = float(torch.stack(held_out).mean())
    return rows


def recorded(commit: str) -> list[dict]:
    """The rows of the results that were measured with this code, a dictionary each."""
    with RESULTS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["commit"] == commit]
    return [
        {
            "experts": row["experts"],
            "seed": int(row["seed"]),
            "step": int(row["step"]),
            "loss": float(row["loss"]),
            "held_out": float(row["held_out"]) if row["held_out"] else None,
        }
        for row in rows
    ]


def compare(rows: list[dict]) -> None:
    """Prints for each option the means over seeds, their spread, and by seed the difference from bf16."""
    last = max(row["step"] for row in rows)
    quarter = [row | {"last quarter": row["loss"]} for row in rows if row["step"] > last * 3 // 4]
    for column, source in (("held_out", rows), ("last quarter", quarter)):
        found: dict[str, dict[int, float]] = {}
        for name in LABELS:
            of_option = [row for row in source if row["experts"] == name and row.get(column) is not None]
            by_seed = {seed: [row[column] for row in of_option if row["seed"] == seed] for seed in range(100)}
            if of_option:
                found[name] = {seed: statistics.fmean(each) for seed, each in by_seed.items() if each}
        for name, by_seed in found.items():
            spread = statistics.stdev(by_seed.values()) if len(by_seed) > 1 else float("nan")
            apart = [f"{loss - found['triton'][seed]:+.4f}" for seed, loss in by_seed.items() if "triton" in found]
            mean = statistics.fmean(by_seed.values())
            print(f"{column}: {LABELS[name]}: {mean:.4f} ({spread:.4f}), from bf16 by seed {', '.join(apart)}")


def draw(rows: list[dict], picture: Path) -> None:
    """The losses by seed, and how far they are from those of bf16 on the same batches: the mean and its standard error."""
    import matplotlib.pyplot as plt

    figure, (whole, apart) = plt.subplots(1, 2, figsize=(9, 3.5))
    losses = {(row["experts"], row["seed"], row["step"]): row["loss"] for row in rows}
    steps = sorted({row["step"] for row in rows})
    names = [name for name in LABELS if any(row["experts"] == name for row in rows)]
    for number, name in enumerate(names):
        seeds = sorted({row["seed"] for row in rows if row["experts"] == name})
        for seed in seeds:
            label = LABELS[name] if seed == seeds[0] else None
            whole.plot(steps, [losses[name, seed, step] for step in steps], color=f"C{number}", lw=0.9, label=label)
        if name == "triton":
            continue
        windows = [steps[last - SMOOTHED : last] for last in range(SMOOTHED, len(steps) + 1)]
        by_window = [
            [statistics.fmean(losses[name, seed, at] - losses["triton", seed, at] for at in each) for seed in seeds]
            for each in windows
        ]
        means = [statistics.fmean(each) for each in by_window]
        errors = [statistics.stdev(each) / len(each) ** 0.5 for each in by_window]
        low, high = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
        ends = [each[-1] for each in windows]
        apart.plot(ends, means, color=f"C{number}")
        apart.fill_between(ends, low, high, color=f"C{number}", alpha=0.15, lw=0)
    whole.set(xlabel="step", ylabel="loss, nats per byte", yscale="log", title="bf16 and FP8, by seed")
    whole.legend(fontsize="small")
    apart.axhline(0, color="C0", lw=0.9)
    apart.set(xlabel="step", title=f"minus bf16's, last {SMOOTHED * WINDOW} steps", ylim=(-0.02, 0.02))
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--experts", nargs="+", default=list(DEFAULT), choices=list(LABELS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path, help="draws the recorded rows of --commit, and trains nothing")
    parser.add_argument("--commit", default="", help="of this code, for the table")
    arguments = parser.parse_args()
    if arguments.picture:
        rows = recorded(arguments.commit)
        compare(rows)
        draw(rows, arguments.picture)
        return
    stamp = {
        "versions": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "commit": arguments.commit,
        "model": MODEL,
    }
    data = text()
    print(MODEL, "bytes:", *map(len, data), flush=True)
    for seed in arguments.seeds:
        for backend in arguments.experts:
            found = train(backend, seed, arguments.steps, data)
            append(RESULTS, COLUMNS, found, **stamp)
            print(found[-1], flush=True)


if __name__ == "__main__":
    main()
