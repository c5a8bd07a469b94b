"""A training step in bf16 beside `train.precision: fp8` on several GPUs, at Qwen3-30B-A3B's width: times, memory, kernels.

    torchrun --nproc-per-node 2 benchmarks/bench_precision.py --layouts FSDP "EP2, peer memory, graph"

One model per layout, whose linear layers and experts compute in one option after the other: the same weights (the learning
rate is 0, AdamW runs nonetheless) and the same rows, in turns; steps with a graph one option after the other. Options: bf16;
experts in FP8 alone; `fp8`, and linear layers of attention; `fp8, narrow`, and weight gradients of these in FP8. The sizes, data
and steps of `bench_train.py`. Appends to results_step_fp8.csv; times are the medians of rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import bench_train
import torch
import torch.distributed as dist
import train_steps
from bench_moe import versions
from bench_step_fp8 import CLASSES, COLUMNS, RESULTS
from bench_train import LAYOUTS, MODEL, Setting
from result_rows import append
from torch._C._autograd import DeviceType

from patchgen.kernels.linear import fp8_linear
from patchgen.runtime import attention, registry, seams
from patchgen.runtime.parallel import ParallelConfig, loss
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import flops, precision

OPTIONS = {  # experts, linear layers in FP8, their weight gradients in FP8
    "bf16": ("triton", False, False),
    "fp8, experts alone": ("fp8", False, False),
    "fp8": ("fp8", True, False),
    "fp8, narrow": ("fp8", True, True),
}
KINDS = (
    ("rows of linear layers, of tokens and of experts' weights to FP8", ("_quantise_rows",)),
    ("linear: other sides, transposed factors", ("_transpose_linear", "_transpose_factor")),
    *CLASSES,
)


class Case:
    """A model in a layout, and steps in each option."""

    def __init__(self, layout: str, setting: Setting, arguments: argparse.Namespace) -> None:
        options = dict(LAYOUTS[layout])
        exchange, self.replays = options.pop("expert_exchange", "all_to_all"), options.pop("cuda_graph", False)
        world = dist.get_world_size()
        self.state = ParallelState.create(
            ParallelConfig.for_world(world, **options), setting.device, expert_exchange=exchange
        )
        self.setting, self.kernels = setting, dict(choice.split("=", 1) for choice in arguments.kernels)
        self.model = bench_train.ours(setting, self.state, "none")
        for linear in precision.find(self.model).values():
            fp8_linear.convert(linear)
        self.linears = [one for one in self.model.modules() if isinstance(one, fp8_linear.Fp8Linear)]
        bench_train.fill(self.model, setting.device)
        self.optimizer = bench_train.optimizer_of(layout, self.model, setting)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        rows = [
            bench_train.inputs_of(arguments.tokens, self.state, setting, i, on_host=self.replays) for i in range(2)
        ]
        self.batches = [inputs for inputs, _ in rows]
        items = [loss.count_items([inputs], setting.device) for inputs in self.batches]
        self.items = [int(count) for count in items] if self.replays else items
        self.take_step: Any = train_steps.our_step

    def use(self, option: str, *, captures: bool) -> contextlib.AbstractContextManager:
        """The option's kernels.

        Args:
            captures: a graph of the option, in place of that of another.
        """
        experts, in_fp8, is_narrow = OPTIONS[option]
        if self.setting.device == "cpu":
            experts = "torch"
        for linear in self.linears:
            linear.is_exact, linear.has_narrow_gradient = not in_fp8, is_narrow
        if self.replays and captures:
            self.take_step = None  # lets go of a captured graph
            gc.collect()
            torch.cuda.empty_cache()
            self.take_step = train_steps.replayed_step(self.model, self.setting.device, self.state)
        return seams.using(fused_moe=experts, causal_lm_loss="auto", **self.kernels)

    def step(self, index: int) -> tuple:
        index %= 2
        return self.take_step(self.model, self.optimizer, self.batches[index], self.state, self.items[index])

    def seconds(self, steps: int) -> float:
        bench_train.synchronise(self.setting)
        started = time.perf_counter()
        for index in range(steps):
            self.step(index)
        bench_train.synchronise(self.setting)
        return (time.perf_counter() - started) / steps


def measure(case: Case, options: list[str], steps: int, rounds: int) -> dict[str, dict]:
    """Option -> its times by round, its memory, its first losses and gradient norms, and its kernels by class."""
    found: dict[str, dict] = {option: {"seconds": []} for option in options}
    turns = [[option] * rounds for option in options] if case.replays else [options] * rounds
    for option in [option for turn in turns for option in turn]:
        one, is_first = found[option], not found[option]["seconds"]
        with case.use(option, captures=is_first):
            if is_first:
                bench_train.reset_peak(case.setting)
                one["figures"] = [tuple(float(number) for number in case.step(index)) for index in range(4)]
                if case.setting.device == "cuda":
                    one["gib"] = torch.cuda.max_memory_allocated() / 2**30
            one["seconds"].append(case.seconds(steps))
            if is_first and case.setting.device == "cuda":
                one["kernels"] = kernels(case.step)
    return found


def kernels(step: Callable[[int], object], steps: int = 2) -> dict[str, float]:
    """ms per step of each class of kernels on this rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for index in range(steps):
            step(index)
        torch.cuda.synchronize()
    recorded = profiler.profiler
    assert recorded is not None and recorded.kineto_results is not None, "nothing was profiled"
    found: dict[str, float] = {}
    for event in recorded.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            name = event.name().lower()
            kind = next((kind for kind, words in KINDS if any(word in name for word in words)), "elementwise, others")
            found[kind] = found.get(kind, 0.0) + event.duration_ns() / 1e6 / steps
    return found


def rows_of(layout: str, case: Case, found: dict[str, dict], arguments: argparse.Namespace):
    slowest = torch.tensor([statistics.median(one["seconds"]) for one in found.values()], device=case.setting.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    milliseconds = dict(zip(found, (1e3 * slowest).tolist(), strict=True))
    layers = case.setting.sizes["num_hidden_layers"]
    common = {"layers": layers, "tokens": arguments.tokens, "micro_batches": 1, "ckpt": "none"}
    where = f"{dist.get_world_size()} GPUs, {layout}, {' '.join(arguments.kernels)}"
    for option, one in found.items():
        yield common | {
            "experts": option,
            "what": f"{where}: step",
            "ms": round(milliseconds[option], 2),
            "of_bf16": round(milliseconds["bf16"] / milliseconds[option], 3),
            "peak_gib": round(one.get("gib", 0), 2),
            "losses": " ".join(f"{share:.5f}/{norm:.4f}" for share, norm in one["figures"]),
        }
    accounts = {option: one.get("kernels", {}) for option, one in found.items()}
    for kind in sorted(set().union(*accounts.values()), key=lambda kind: -accounts["bf16"].get(kind, 0)):
        for option, account in accounts.items():
            yield common | {"experts": option, "what": f"{where}: {kind}", "ms": round(account.get(kind, 0), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument(
        "--layouts", nargs="+", default=["FSDP", "FSDP, graph", "EP2, peer memory, graph"], choices=list(LAYOUTS)
    )
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--kernels", nargs="+", default=["rms_norm=auto", "rotary=compiled"], metavar="SEAM=NAME")
    parser.add_argument("--steps", type=int, default=6, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", default="", help="of this code, for the table")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=300))
    attention.register()
    name = attention.choose() if device == "cuda" else "sdpa"
    sizes = bench_train.TINY if arguments.tiny else MODEL
    sizes = sizes | {"num_hidden_layers": arguments.layers, "max_window_layers": arguments.layers}
    with torch.device("meta"):
        cost = flops.model_cost(registry.build_model(bench_train.config_of(sizes)))
    setting = Setting(device, sizes, name, name, arguments.steps, 4, cost, None, None)
    for layout in arguments.layouts:
        case = Case(layout, setting, arguments)
        found = measure(case, arguments.options, arguments.steps, arguments.rounds)
        for row in rows_of(layout, case, found, arguments):
            if dist.get_rank() == 0:
                if device == "cuda":
                    append(RESULTS, COLUMNS, [row], versions=versions(), commit=arguments.commit)
                print("| " + " | ".join(str(row.get(column, "")) for column in COLUMNS[3:]) + " |", flush=True)
        del case
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
