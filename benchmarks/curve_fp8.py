"""The loss of a small model with experts in FP8 beside the same in bf16: several seeds each, the same batches for all.

    python benchmarks/curve_fp8.py --steps 2000 --seeds 0 1 2

A decoder of bytes over the text of Python's standard library, every eleventh file of it held out. Everything but the experts,
and the linear layers of attention in some, is bf16 in all; parameters and AdamW are fp32. Appends the losses to
results_curve_fp8.csv, prints what they are compared by: the difference of the means from those of bf16 and the spread over seeds.
`--picture` draws them.
"""

from __future__ import annotations

import argparse
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
    "fp8": "FP8",
    "fp8_wide_gradients": "FP8, weight gradients in bf16",
    "fp8, linear": "FP8, and linear layers",
    "fp8, linear narrow": "FP8, and linear layers with their weight gradients",
}
"""Experts' kernels, and whether the linear layers of attention are in FP8, as `train.precision: fp8` has them."""
WINDOW = 50
"""Steps whose losses are averaged, and batches that the held-out loss is measured on."""
MODEL = f"H {HIDDEN}, I {INNER}, E {EXPERTS}, k {TOP_K}, {LAYERS} layers, {ROWS} x {LENGTH} bytes a step"


class Layer(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend, self.act = backend.partition(",")[0], nn.SiLU()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv, self.project = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        for linear in (self.qkv, self.project) if ", linear" in backend else ():
            fp8_linear.convert(linear, narrow_gradient="narrow" in backend)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * (2 * LAYERS * INNER) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x [B, S, H]` and the loss that balances the router."""
        q, k, v = self.qkv(self.norms[0](x).bfloat16()).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        tokens = self.norms[1](x).flatten(0, 1).bfloat16()
        shares = self.router(tokens).float().softmax(-1)
        weights, index = shares.topk(TOP_K, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()
        stacks = self.gate_up.bfloat16(), self.down.bfloat16()
        out = fused_moe(
            tokens, index, weights, *stacks, num_experts=EXPERTS, activation=self.act, backend=self.backend
        )
        load = F.one_hot(index, EXPERTS).sum((0, 1)) / index.numel()
        return x + out.view_as(x), EXPERTS * (load * shares.mean(0)).sum()


class Decoder(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Layer(backend) for _ in range(LAYERS))
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


def train(backend: str, seed: int, steps: int, data: tuple[Tensor, Tensor]) -> list[dict]:
    """One row per `WINDOW` steps, with the mean loss of these steps; the last one with the held-out loss."""
    torch.manual_seed(seed)
    model, generator = Decoder(backend).cuda(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    warm_up = 100
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1) * (1 - 0.9 * step / steps)
    )
    rows, losses, started = [], [], time.time()
    for step in range(1, steps + 1):
        with torch.autocast("cuda", torch.bfloat16):
            loss, balance = model(batch(data[0], generator))
        (loss + 0.01 * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if step % WINDOW == 0:
            rows.append({"experts": backend, "seed": seed, "step": step, "loss": float(torch.stack(losses).mean())})
            losses = []
    rows[-1]["seconds"] = round(time.time() - started)
    generator = torch.Generator().manual_seed(12345)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        held_out = [model(batch(data[1], generator))[0] for _ in range(WINDOW)]
    rows[-1]["held_out"] = float(torch.stack(held_out).mean())
    return rows


def draw(rows: list[dict], picture: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (whole, end) = plt.subplots(1, 2, figsize=(9, 3.5))
    for row_of, colour in zip(LABELS, ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple"), strict=True):
        for seed in sorted({row["seed"] for row in rows}):
            points = [(row["step"], row["loss"]) for row in rows if (row["experts"], row["seed"]) == (row_of, seed)]
            if not points:
                continue
            label = LABELS[row_of] if seed == rows[0]["seed"] else None
            whole.plot(*zip(*points, strict=True), color=colour, lw=0.9, label=label)
            end.plot(*zip(*points[len(points) * 3 // 4 :], strict=True), color=colour, lw=0.9)
    whole.set(xlabel="step", ylabel="loss, nats per byte", yscale="log", title="bf16 and FP8, by seed")
    end.set(xlabel="step", title="the last quarter")
    whole.legend()
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--experts", nargs="+", default=list(LABELS), choices=list(LABELS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--commit", default="", help="of this code, for the table")
    arguments = parser.parse_args()
    stamp = {
        "versions": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "commit": arguments.commit,
        "model": MODEL,
    }
    data, rows = text(), []
    print(MODEL, "bytes:", *map(len, data), flush=True)
    for seed in arguments.seeds:
        for backend in arguments.experts:
            found = train(backend, seed, arguments.steps, data)
            append(RESULTS, COLUMNS, found, **stamp)
            rows += found
            print(found[-1], flush=True)
    for column in ("loss", "held_out"):
        ends = {
            backend: [row[column] for row in rows if row["experts"] == backend and "held_out" in row]
            for backend in arguments.experts
        }
        means = {backend: statistics.fmean(each) for backend, each in ends.items()}
        spread = {backend: statistics.stdev(each) for backend, each in ends.items() if len(each) > 1}
        apart = {backend: each - means["triton"] for backend, each in means.items() if "triton" in means}
        print(column, "means", means, "differences", apart, "spread of seeds", spread)
    if arguments.picture:
        draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
