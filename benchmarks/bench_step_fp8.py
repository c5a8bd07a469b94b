"""A training step with experts in FP8 beside bf16, on one GPU, at Qwen3-30B-A3B's width: times, memory, and where the time goes.

    torchrun --nproc-per-node 1 benchmarks/bench_step_fp8.py --layers 4 --tokens 16384

Cases: steps of one micro-batch and of several, layers kept or computed again; each with bf16 experts, with FP8 that
quantises weights in each call, and with FP8 that keeps them (`undivided.keep_fp8`: rows by AdamW). One model per case, the
same weights, rows and steps. The first losses of kept and unkept FP8 have to be the same (later ones differ, as those of bf16
do, where attention's backward adds in any order). Appends to results_step_fp8.csv.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import os
from collections import Counter
from pathlib import Path

import bench_step_account
import bench_train
import torch
import torch.distributed as dist
from bench_moe import versions
from bench_train import MODEL, Setting
from result_rows import append

from patchgen.runtime import attention, parallel, registry, seams
from patchgen.runtime.parallel import ParallelConfig, gradients, loss, sharding, undivided
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import flops, trainer

RESULTS = Path(__file__).with_name("results_step_fp8.csv")
COLUMNS = ("date", "versions", "commit", "layers", "tokens", "micro_batches", "ckpt", "experts", "what", "ms", "of_bf16",
           "peak_gib", "losses")  # fmt: skip
BF16, FP8, KEPT = "bf16", "fp8", "fp8, kept"
CLASSES = (
    ("experts: weights to FP8", ("_quantise_rows", "_transpose_weight")),
    ("experts: tokens to FP8, transposed factors", ("_quantise_tokens", "_transpose_tile", "_largest_scales")),
    ("experts: gates", ("_fp8_gate",)),
    ("experts: weight gradients", ("_fp8_weight_gradient", "gemm_weights")),
    ("experts: products", ("_fp8_product", "_gate_up", "grouped_gemm", "_gate_backward")),
    *(entry for entry in bench_step_account.CLASSES if entry[0] != "experts' products"),
)


class Case:
    """A model and its steps; kernels of the experts are chosen where it runs."""

    def __init__(self, setting: Setting, state: ParallelState, experts: str, mode: str, micro_batches: int) -> None:
        self.setting, self.state, self.experts, self.micro_batches = setting, state, experts, micro_batches
        self.model = bench_train.ours(setting, state, mode)  # no seam is chosen yet, so it keeps nothing
        if experts == KEPT:
            undivided.keep_fp8(self.model, transposed=micro_batches > 1)
        bench_train.fill(self.model, setting.device)
        self.optimizer = bench_train.optimizer_of("FSDP", self.model, setting)
        self.batches: list[dict] = []
        self.losses: list[float] = []

    def use(self, tokens: int) -> None:
        self.batches = [
            bench_train.inputs_of(tokens, self.state, self.setting, index)[0] for index in range(self.micro_batches)
        ]
        self.items = loss.count_items(self.batches, self.setting.device)

    def step(self, _index: int = 0) -> None:
        total = torch.zeros((), device=self.setting.device)
        kernel = "triton" if self.experts == BF16 else "fp8"
        with seams.using(fused_moe=kernel, causal_lm_loss="auto"), parallel.using(self.state), loss.step(self.items):
            for index, inputs in enumerate(self.batches):
                sharding.reduce_gradients(self.model, is_last=index == len(self.batches) - 1)
                share = self.model(**inputs, num_items_in_batch=self.items, use_cache=False).loss
                share.backward()
                total += share.detach()
        gradients.clip(self.model, 1.0, optimizer=self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.total = total

    def noted(self) -> None:
        self.step()
        self.losses.append(float(self.total))

    def times(self, steps: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]

    def kernels(self, steps: int = 2) -> Counter:
        """ms per step of each class of kernels."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                self.step()
            torch.cuda.synchronize()
        found: Counter = Counter()
        for each in profile.key_averages():
            name = each.key.lower()
            kind = next((kind for kind, words in CLASSES if any(word in name for word in words)), "others")
            found[kind] += each.self_device_time_total / 1e3 / steps
        return found


def compare(setting: Setting, state: ParallelState, arguments: argparse.Namespace, mode: str, micro_batches: int):
    """Rows of one comparison."""
    medians, peaks, losses, accounts = {}, {}, {}, {}
    for experts in (BF16, FP8, KEPT):
        case = Case(setting, state, experts, mode, micro_batches)
        case.use(arguments.tokens)
        for _ in range(3):
            case.noted()
        trainer.freeze_objects()
        torch.cuda.reset_peak_memory_stats()
        measured = sorted(case.times(arguments.steps))
        medians[experts] = measured[len(measured) // 2]
        case.noted()
        peaks[experts], losses[experts] = torch.cuda.max_memory_allocated() / 2**30, case.losses
        accounts[experts] = case.kernels() if mode == "none" or micro_batches == 1 else Counter()
        del case
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    kept_is_same = losses[FP8][0] == losses[KEPT][0]
    common = {"layers": arguments.layers, "tokens": arguments.tokens, "micro_batches": micro_batches, "ckpt": mode}
    for experts in medians:
        yield common | {
            "experts": experts,
            "what": "step" if experts != KEPT else f"step; same first loss as unkept: {kept_is_same}",
            "ms": round(medians[experts], 2),
            "of_bf16": round(medians[BF16] / medians[experts], 3),
            "peak_gib": round(peaks[experts], 2),
            "losses": " ".join(f"{each:.5f}" for each in losses[experts]),
        }
    for kind in sorted(set().union(*accounts.values()), key=lambda kind: -accounts[BF16][kind]):
        for experts, account in accounts.items():
            yield common | {"experts": experts, "what": kind, "ms": round(account[kind], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=9, help="timed, after four")
    parser.add_argument(
        "--cases", nargs="+", default=["none:1", "full:1", "none:4"], help="checkpointing:micro-batches"
    )
    parser.add_argument("--commit", default="", help="of this code, for the table")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=300))
    attention.register()
    name = attention.choose()
    sizes = MODEL | {"num_hidden_layers": arguments.layers, "max_window_layers": arguments.layers}
    with torch.device("meta"):
        cost = flops.model_cost(registry.build_model(bench_train.config_of(sizes)))
    peak = flops.peak_tflops(torch.device("cuda"))
    setting = Setting("cuda", sizes, name, name, arguments.steps, 4, cost, peak, None)
    state = ParallelState.create(ParallelConfig.for_world(1), "cuda")
    print(versions(), name, flush=True)
    for entry in arguments.cases:
        mode, _, micro_batches = entry.partition(":")
        for row in compare(setting, state, arguments, mode, int(micro_batches)):
            append(RESULTS, COLUMNS, [row], versions=versions(), commit=arguments.commit)
            print("| " + " | ".join(str(row.get(column, "")) for column in COLUMNS[3:]) + " |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
