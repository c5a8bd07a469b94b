"""A row-sharded table beside the same table gathered by FSDP: memory, time and losses of forward, backward and AdamW.

    torchrun --nproc-per-node 2 benchmarks/bench_table.py --commit ID                                 # GPUs: 1e8 rows of 64
    torchrun --nproc-per-node 2 benchmarks/bench_table.py --commit ID --rows 4000000 --tokens 4096    # gloo ranks on the CPU

A step looks up 16 rows for each token, as the n-gram tables of qwen4_exp do, projects them, and steps AdamW; the gathered table
takes the same steps from the same weights, unless `--without-gathered`. Parameters and states are fp32, a rank computes in bf16 on
GPUs and in fp32 on CPUs. Time is the median of the steps after the first two, memory the most of a rank: allocated on GPUs; on
CPUs resident, sampled, less what was resident before; figures are of rank 0. Appends to results_table.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from result_rows import append
from torch import Tensor, nn

from patchgen.runtime.parallel import ParallelConfig, gradients, sharding
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train.optimizers import adamw_for

RESULTS = Path(__file__).with_name("results_table.csv")
COLUMNS = (
    "date", "versions", "commit", "device", "ranks", "rows", "width", "tokens", "what", "rank_parameters_gib", "peak_gib", "ms",
    "first_loss", "last_loss", "last_norm",
)  # fmt: skip
HEADS = 16  # rows per token
HIDDEN = 512


class Model(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.layers = nn.ModuleList([nn.Linear(HEADS * width, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])

    def forward(self, ids: Tensor) -> Tensor:
        """A loss without labels, of ids `[T, HEADS]`, summed over tokens."""
        hidden = self.layers[0](self.table(ids).flatten(-2))
        return (self.layers[1](hidden.relu()).float() - 1).square().mean(-1).sum()


class Peak:
    """GiB at most: allocated on a GPU; on the CPU resident, sampled, beyond what was resident at the start."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.gib = on_gpu, 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            yield
            self.gib = torch.cuda.max_memory_allocated() / 2**30
            return
        before, ended = _resident(), threading.Event()

        def sample() -> None:
            while not ended.wait(0.02):
                self.gib = max(self.gib, (_resident() - before) / 2**30)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        yield
        ended.set()
        thread.join()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(what: str, options: argparse.Namespace, device: torch.device) -> dict:
    """The row of one way to hold the table, the same on all ranks but for figures of this rank."""
    on_gpu, world = device.type == "cuda", dist.get_world_size()
    state = ParallelState.create(ParallelConfig.for_world(world), device.type)
    peak, seconds, losses, norms = Peak(on_gpu), [], [], []
    with peak.measured():
        with torch.device("meta"):
            model = Model(options.rows, options.width)
        sharding.shard_model(
            model,
            state,
            layer_classes=("Linear",),
            options=sharding.ShardingOptions(
                param_dtype=torch.bfloat16 if on_gpu else None,
                reduce_dtype=torch.float32,
                shard_tables_above=1 if what == "row-sharded" else None,
            ),
        )
        sharding.materialise(model, device)
        _fill(model)
        groups = sharding.optimizer_groups(model)
        optimizer = adamw_for(nn.Parameter(sharding.undivided.local(model.table.weight), requires_grad=False))(
            groups, lr=1e-2
        )
        for step in range(options.steps):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            ids = torch.randint(options.rows, (options.tokens, HEADS), generator=generator).to(device)
            dist.barrier()
            start = time.perf_counter()
            share = model(ids) / (options.tokens * world)
            share.backward()
            norm = gradients.clip(model, 1.0, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(float(norm))  # waits for the device
            seconds.append(time.perf_counter() - start)
            total = share.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total))
    stored = sum(sharding.undivided.local(parameter).nbytes for parameter in model.parameters())
    return {
        "what": what,
        "rank_parameters_gib": round(stored / 2**30, 2),
        "peak_gib": round(peak.gib, 2),
        "ms": round(1000 * statistics.median(seconds[2:]), 1),
        "first_loss": f"{losses[0]:.7f}",
        "last_loss": f"{losses[-1]:.7f}",
        "last_norm": f"{norms[-1]:.7f}",
    }


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Values by the place in the whole parameter, the same on any ranks and however it is held: shards are consecutive."""
    for number, parameter in enumerate(model.parameters()):
        shard = sharding.undivided.local(parameter)
        per_rank = -(-parameter.shape[0] // dist.get_world_size()) * (parameter.numel() // parameter.shape[0])
        flat = shard.view(-1)
        for start in range(0, flat.numel(), 2**24):
            piece = flat[start : start + 2**24]
            place = torch.arange(len(piece), device=flat.device, dtype=torch.float64) + start
            place += dist.get_rank() * per_rank
            piece.copy_((place * 0.6180339887 + number).frac_().sub_(0.5).mul_(0.1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="of the code that runs")
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a rank")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--without-gathered", action="store_true")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    for what in ("row-sharded", *(() if options.without_gathered else ("gathered",))):
        row = measure(what, options, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        row |= {"device": name, "ranks": dist.get_world_size()}
        row |= {"rows": options.rows, "width": options.width, "tokens": options.tokens}
        if dist.get_rank() == 0:
            print(row, flush=True)
            versions = f"torch {importlib.metadata.version('torch')}"
            append(RESULTS, COLUMNS, [row], versions=versions, commit=options.commit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
