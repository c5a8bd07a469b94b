"""Where the time of a training step goes: every kernel of some steps, by what it does, and the time in which nothing computes.

    torchrun --nproc-per-node 2 benchmarks/bench_step_account.py --layouts "EP2, peer memory, graph" "FSDP, graph"

The sizes, data and steps of `bench_train.py`; steps with a graph are replayed here, too. Prints for each rank, in ms per step:

    kernels     by class, the sum of their durations; on several streams they overlap
    computing   the time in which at least one kernel runs that is not part of an exchange
    exchange    of the remaining time, that in which rows, shards or gradients are exchanged, or a barrier waits
    nothing     the rest: no kernel runs at all
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import bench_train
import torch
import torch.distributed as dist
import train_steps
from bench_train import LAYOUTS, MODEL, WHO, Setting
from torch._C._autograd import DeviceType

from patchgen.runtime import attention, registry, seams
from patchgen.runtime.parallel import ParallelConfig, loss
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import flops

CLASSES = (  # the first whose word is in a kernel's name
    ("barrier", ("barrier",)),
    (
        "exchange",
        (
            *("_read_tokens", "_read_routing", "_sum_rows", "_read_slots", "_sum_parts", "_push", "_sum_received"),
            *("nccl", "memcpy ptop", "peer"),
        ),
    ),
    ("adamw", ("_adamw",)),
    ("norm of gradients", ("_sum_squares", "lpnorm")),
    ("experts' products", ("_gate_up", "grouped_gemm", "_gate_backward", "specialized", "gemm_weights")),
    ("experts' rows", ("_combine", "_plan", "_pad_rows", "_router_gradient", "radix", "sort")),
    ("attention", ("flash", "fmha")),
    ("matrix products", ("nvjet", "gemm", "cutlass", "xmma")),
    ("loss", ("cross_entropy", "_scaled")),
    ("copies", ("memcpy", "memset", "copy", "fill")),
)
EXCHANGES = ("barrier", "exchange")
MODEL_OPTIONS = ("shard_exchange", "reshard_after_forward")
SUPPORTED = [name for name, options in LAYOUTS.items() if name not in WHO and not options.keys() & set(MODEL_OPTIONS)]
"""Layouts of this project that differ in their parallel state and in the graph only."""


def class_of(name: str) -> str:
    low = name.lower()
    return next((kind for kind, words in CLASSES if any(word in low for word in words)), "norms, rotary, elementwise")


def union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time in spans that do not overlap."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def total(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def summary(events: list[tuple[str, int, int]], steps: int) -> list[tuple[str, float, float]]:
    """`(what, ms per step, kernels per step)`: classes by their time, then the full step and its three parts.

    Args:
        events: name, start and end in ns of each kernel.
    """
    times, counts = Counter(), Counter()
    spans: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for name, start, end in events:
        kind = class_of(name)
        times[kind] += end - start
        counts[kind] += 1
        spans[kind in EXCHANGES].append((start, end))
    wall = max(end for _, _, end in events) - min(start for _, start, _ in events)
    computing, busy = total(union(spans[False])), total(union(spans[True] + spans[False]))
    parts = {"a step": wall, "computing": computing, "exchange alone": busy - computing, "nothing": wall - busy}
    totals = [(kind, time, counts[kind]) for kind, time in times.most_common()]
    totals += [(part, time, 0) for part, time in parts.items()]
    return [(what, time / 1e6 / steps, count / steps) for what, time, count in totals]


def account(step: Callable[[int], object], steps: int) -> list[str]:
    """Lines of a table, of this rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for index in range(steps):
            step(index)
        torch.cuda.synchronize()
    recorded = profiler.profiler
    assert recorded is not None and recorded.kineto_results is not None, "nothing was profiled"
    events = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in recorded.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    ]
    lines = [f"  {time:8.2f} ms {count:7.0f} x {what}" for what, time, count in summary(events, steps)]
    by_name = Counter()
    for name, start, end in events:
        by_name[name] += end - start
    return lines + [f"      {time / 1e6 / steps:8.3f} ms {name[:110]}" for name, time in by_name.most_common(45)]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--layouts", nargs="+", default=["EP2, peer memory, graph", "FSDP, graph"], choices=SUPPORTED)
    parser.add_argument("--lr", type=float, default=1e-5, help="0: routing stays what random weights make it")
    parser.add_argument("--steps", type=int, default=8, help="timed; three of them are accounted for")
    parser.add_argument("--kernels", nargs="+", default=["rms_norm=auto", "rotary=compiled"], metavar="SEAM=NAME")
    return parser.parse_args()


def account_for_layout(layout: str, setting: Setting, arguments: argparse.Namespace) -> None:
    """Builds the model for one layout and prints, for each number of tokens, where its steps spend their time."""
    options = dict(LAYOUTS[layout])
    exchange, replays = options.pop("expert_exchange", "all_to_all"), options.pop("cuda_graph", False)
    state = ParallelState.create(
        ParallelConfig.for_world(dist.get_world_size(), **options), "cuda", expert_exchange=exchange
    )
    model = bench_train.ours(setting, state, "none")
    for tokens in arguments.tokens:
        bench_train.fill(model, "cuda")
        optimizer = bench_train.optimizer_of(layout, model, setting)
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr
        step: Any = train_steps.replayed_step(model, setting.device, state) if replays else train_steps.our_step
        batches = [bench_train.inputs_of(tokens, state, setting, i, on_host=replays)[0] for i in range(2)]
        items = [loss.count_items([inputs], "cuda") for inputs in batches]
        items = [int(count) for count in items] if replays else items

        def take(index: int) -> tuple:
            return step(model, optimizer, batches[index % 2], state, items[index % 2])  # noqa: B023

        losses_and_norms = [tuple(float(number) for number in take(index)) for index in range(5)]
        bench_train.synchronise(setting)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            for index in range(arguments.steps):
                take(index)
            bench_train.synchronise(setting)
            seconds.append((time.perf_counter() - started) / arguments.steps)
        lines = account(take, 3)
        peak_gib = torch.cuda.max_memory_allocated() / 2**30
        for rank in range(dist.get_world_size()):
            dist.barrier()
            if rank == dist.get_rank():
                print(
                    f"\n{layout}, {tokens} tokens, rank {rank}, {setting.attention}; {peak_gib:.1f} GiB of torch's own"
                )
                print("  s/step " + " ".join(f"{time_of_run:.4f}" for time_of_run in seconds))
                print("  losses and norms " + " ".join(f"{a:.5f}/{b:.4f}" for a, b in losses_and_norms))
                print("\n".join(lines), flush=True)
        optimizer, step = None, train_steps.our_step  # lets go of a captured graph


def main() -> None:
    arguments = read_arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=300))
    attention.register()
    name = attention.choose()
    sizes = MODEL | {"num_hidden_layers": arguments.layers, "max_window_layers": arguments.layers}
    with torch.device("meta"):
        cost = flops.model_cost(registry.build_model(bench_train.config_of(sizes)))
    peak = flops.peak_tflops(torch.device("cuda"))
    setting = Setting("cuda", sizes, name, name, arguments.steps, 5, cost, peak, None)
    choices = {"fused_moe": "auto", "causal_lm_loss": "auto"} | dict(
        choice.split("=", 1) for choice in arguments.kernels
    )
    with seams.using(**choices):
        for layout in arguments.layouts:
            account_for_layout(layout, setting, arguments)
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
