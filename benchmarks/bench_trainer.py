"""The trainer beside the loop of `bench_train.py`: one model, its rows and kernels, in one process; and memory beside its estimate.

    torchrun --nproc-per-node 2 benchmarks/bench_trainer.py speed --layers 12
    torchrun --nproc-per-node 2 benchmarks/bench_trainer.py memory --layers 4
    torchrun --nproc-per-node 2 benchmarks/bench_trainer.py memory --device cpu --tiny        # that it runs, on gloo

speed    `our_step` (or `replayed_step`) of `train_steps.py` on the trainer's model and optimizer, timed as `bench_train.py`
         does; then `Trainer.run` on the same rows, as `patchgen train` calls it, with counts of experts, log and checks. Both
         by the clock from one step's end to another's, with the device waited for at both, and three further steps of each
         by kernels (`bench_step_account.py`). The learning rate is so small that routing stays what the weights make it.
memory   a few steps of each case: the largest sum of what torch has allocated and what ranks share, where it was reached,
         and the estimate that `patchgen train --dry-run` prints.

Rows of random text and weights by name are those of `bench_train.py`; there is no router loss.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_recipe
import bench_step_account
import bench_train
import result_rows
import torch
import torch.distributed as dist
import train_steps
from packed_rows import packed_row

from patchgen.runtime import launch
from patchgen.runtime.data.collate import text_sample
from patchgen.runtime.data.loader import make_batch
from patchgen.runtime.data.problems import Counters
from patchgen.runtime.parallel import batch, checkpointing, loss, peer_memory
from patchgen.runtime.train import memory, recipe, setup
from patchgen.runtime.train import model as models
from patchgen.runtime.train.records import Listener, StepRecord
from patchgen.runtime.train.trainer import Trainer, freeze_objects

SPEED = Path(__file__).with_name("results_trainer.csv")
MEMORY = Path(__file__).with_name("results_memory.csv")
STAMP = ("date", "commit", "versions", "gpus")
SPEED_COLUMNS = (*STAMP, "layers", "case", "tokens/GPU", "loop", "s/step", "MFU %", "MFU % logged", "ratio", "computing ms",
                 "exchange alone ms", "nothing ms")  # fmt: skip
MEMORY_COLUMNS = (*STAMP, "layers", "case", "tokens/GPU", "estimate GiB", "peak GiB", "estimate / peak", "shared GiB",
                  "reserved GiB", "reached in", "after forward GiB", "parts GiB")  # fmt: skip
GRAPH = {"train.cuda_graph": True}
CASES: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "FSDP, graph": GRAPH,
    "EP2": {"parallel.ep": 2},
    "EP2, graph": {"parallel.ep": 2, **GRAPH},
    "SP2": {"parallel.sp": 2},
    "FSDP, collectives": {"parallel.shard_exchange": "collectives"},
    "FSDP, kept gathered": {"parallel.reshard_after_forward": False},
    "FSDP, recomputed": {"parallel.activation_checkpointing": "full"},
    "FSDP, selective": {"parallel.activation_checkpointing": "selective"},
    "EP2, recomputed": {"parallel.ep": 2, "parallel.activation_checkpointing": "full"},
    "LoRA": {"lora": {"rank": 16}},
    "LoRA of experts": {
        "lora": {"rank": 16, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    },
    "LoRA, recomputed": {"lora": {"rank": 16}, "parallel.activation_checkpointing": "full"},
    "accumulated": {"micro_batches": 2},
}
"""Name -> keys of the recipe; `micro_batches`: of each batch group."""
ON_ONE_GPU = ("FSDP", "FSDP, graph", "FSDP, recomputed", "FSDP, selective", "LoRA", "LoRA of experts", "accumulated")


class Enough(Exception):
    """Ends a run after its last timed step: it has nothing to save."""


class Rows:
    """Two rows of `bench_train.py`, one after the other, as a loader gives them."""

    is_sharded, counters = False, Counters()

    def __init__(self, tokens: int, vocabulary: int, index: int, world: int) -> None:
        self.rows = [self._row(tokens, vocabulary, step * 10_000 + index, world) for step in range(2)]
        self.step = 0

    @staticmethod
    def _row(tokens: int, vocabulary: int, seed: int, sp: int) -> dict[str, Any]:
        whole = [packed_row(tokens, vocabulary, seed * sp + part) for part in range(sp)]
        ids, positions = (torch.cat([one[name][0] for one in whole]) for name in ("input_ids", "position_ids"))
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        documents = [ids[a:b] for a, b in itertools.pairwise(starts)]
        return make_batch([(0, text_sample(one, None)) for one in documents], pad_to=len(ids), pad_token_id=0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        self.step += 1
        return dict(self.rows[(self.step - 1) % 2])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def recipe_of(arguments: argparse.Namespace, case: str, tokens: int, world: int) -> recipe.Recipe:
    """The recipe of a case."""
    settings = dict(CASES[case])
    micro_batches, sp = settings.pop("micro_batches", 1), settings.get("parallel.sp", 1)
    sections: dict[str, Any] = {
        "model": {"source": str(arguments.folder / f"model-{arguments.layers}")},
        "data": {"sources": [{"path": str(arguments.folder / "text.jsonl")}], "tokens_per_batch": tokens * sp},
        "train": {"steps": 1000, "batches_per_step": world // sp * micro_batches, "router_balance": "none"},
        "optim": {"lr": 1e-12, "schedule": "constant"},
        "checkpoint": {"export": False},
        "kernels": {seam: name for seam, _, name in (kernel.partition("=") for kernel in arguments.kernels)},
        "log": {"directory": str(arguments.folder / "runs" / f"{case}-{tokens}-{arguments.started}")},
    }
    sections["data"] |= {"pad_batches": True, "on_long": "split", "cache_dir": str(arguments.folder / "cache")}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections[section] = {**sections.get(section, {}), name: value} if name else value
    if case.startswith("LoRA"):
        sections["optim"]["lr"] = 1e-6
    return recipe.from_dict(sections)


def build(
    arguments: argparse.Namespace, case: str, tokens: int, device: torch.device, *listeners: Listener
) -> Trainer:
    """The trainer of a case, with weights by name and the rows of `bench_train.py`."""
    # Weights by name, made on the device.
    models.initialise = lambda model, *_, **__: bench_train.fill(model, device.type)  # pyright: ignore
    trainer = Trainer(recipe_of(arguments, case, tokens, dist.get_world_size()), device, listeners)
    vocabulary = trainer.model.config.vocab_size
    trainer.loader = Rows(tokens, vocabulary, trainer.state.batch_index, trainer.state.sp)  # pyright: ignore
    return trainer


# ------------------------------------------------------------------------------------------------------------ speed


class Timed(Listener):
    """Times steps of a run by the clock, profiles three more, and ends it."""

    def __init__(self, warm_up: int, steps: int, device: torch.device) -> None:
        self.warm_up, self.steps, self.device = warm_up, steps, device
        self.logged: list[float] = []
        self.seconds, self.events = 0.0, []
        self.first_steps: list[float] = []
        self._began = time.perf_counter()

    def on_step(self, record: StepRecord) -> None:
        if record.step <= 2:
            self.first_steps.append(time.perf_counter() - self._began)
        last = self.warm_up + self.steps
        if record.step == self.warm_up:
            wait(self.device)
            self._began = time.perf_counter()
        elif record.step <= last:
            self.logged.append(record.mfu or 0.0)
        if record.step == last:
            wait(self.device)
            self.seconds = (time.perf_counter() - self._began) / self.steps
            if self.device.type != "cuda":
                raise Enough
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.__enter__()
        if record.step == last + 3:
            wait(self.device)
            self._profile.__exit__(None, None, None)
            self.events = kernels_of(self._profile)
            raise Enough


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def kernels_of(profiler: torch.profiler.profile) -> list[tuple[str, int, int]]:
    """Name, start and end in ns of each kernel."""
    recorded = profiler.profiler
    assert recorded is not None and recorded.kineto_results is not None, "nothing was profiled"
    return [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in recorded.kineto_results.events()
        if event.device_type() == bench_step_account.DeviceType.CUDA
    ]


def benchmark_loop(trainer: Trainer, tokens: int, warm_up: int, steps: int) -> tuple[float, list]:
    """Seconds of a step, and the kernels of three."""
    device, state, replays = trainer.device, trainer.state, trainer.recipe.train.cuda_graph
    rows = Rows(tokens, trainer.model.config.vocab_size, state.batch_index, state.sp).rows
    inputs = [batch.slice_batch(row, sp=state.sp, sp_rank=state.sp_rank) for row in rows]
    inputs = [{name: value for name, value in one.items() if name != "document_sources"} for one in inputs]
    items: list = [loss.count_items([one], device) for one in inputs]
    step: Any = train_steps.our_step
    if replays:
        step, items = train_steps.replayed_step(trainer.model, device.type, state), [int(count) for count in items]
    else:
        inputs = [
            {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in one.items()}
            for one in inputs
        ]

    def take(index: int) -> None:
        step(trainer.model, trainer.optimizer, inputs[index % 2], state, items[index % 2])

    for index in range(warm_up):
        take(index)
    freeze_objects()
    wait(device)
    began = time.perf_counter()
    for index in range(steps):
        take(index)
    wait(device)
    seconds = (time.perf_counter() - began) / steps
    if device.type != "cuda":
        return seconds, []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for index in range(3):
            take(index)
        wait(device)
    return seconds, kernels_of(profiler)


def slowest(seconds: float, device: torch.device) -> float:
    longest = torch.tensor(seconds, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def speed(arguments: argparse.Namespace, case: str, tokens: int, device: torch.device) -> list[dict]:
    """Rows of both loops."""
    timed = Timed(arguments.warm_up, arguments.steps, device)
    listeners = (timed,)
    if dist.get_rank() == 0:  # what a run writes and prints, too
        listeners = (*setup.listeners(recipe_of(arguments, case, tokens, dist.get_world_size())), timed)
    trainer = build(arguments, case, tokens, device, *listeners)
    of_loop, events = benchmark_loop(trainer, tokens, arguments.warm_up, arguments.steps)
    gc.unfreeze()
    gc.collect()
    with contextlib.suppress(Enough):
        trainer.run()
    work = torch.tensor(
        sum(trainer.cost.flops(row["cu_seq_lens_q"].diff().tolist()) for row in trainer.loader.rows)  # pyright: ignore
        / (2 * trainer.state.sp),
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(work)
    peak = trainer.peak_tflops
    rows = []
    for name, seconds, found in (("benchmark", of_loop, events), ("trainer", timed.seconds, timed.events)):
        seconds = slowest(seconds, device)
        row = {
            "layers": arguments.layers,
            "case": case,
            "tokens/GPU": tokens,
            "loop": name,
            "s/step": round(seconds, 4),
        }
        row["ratio"] = round(slowest(of_loop, device) / seconds, 3)
        if peak:
            row["MFU %"] = round(100 * float(work) / seconds / dist.get_world_size() / 1e12 / peak, 1)
        if found:
            lines = bench_step_account.summary(found, 3)
            account = {what: f"{milliseconds:.1f}" for what, milliseconds, _ in lines}
            row |= {f"{what} ms": account[what] for what in ("computing", "exchange alone", "nothing")}
            if dist.get_rank() == 0:
                print(f"  {name}: " + "; ".join(f"{what} {ms:.1f}" for what, ms, _ in lines), flush=True)
        rows.append(row)
    if peak and timed.logged:
        rows[1]["MFU % logged"] = round(100 * sorted(timed.logged)[len(timed.logged) // 2], 1)
    if dist.get_rank() == 0:
        print(f"  the trainer's first two steps ended after {timed.first_steps}", flush=True)
    return rows


# ----------------------------------------------------------------------------------------------------------- memory


class Few(Listener):
    """Ends a run after a few steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, record: StepRecord) -> None:
        if record.step == self.steps:
            raise Enough


def estimate(given: recipe.Recipe, device: torch.device) -> memory.Estimate:
    """The estimate of a dry run on these ranks."""
    built = models.build_on_meta(given)
    checkpointing.apply(built, given.parallel.activation_checkpointing)
    chosen = models.configure_seams(given, built)
    layout = models.parallel_config(given.parallel, dist.get_world_size())
    options = models.sharding_options(given.parallel, device)
    return memory.estimate(built, given, layout, options.param_dtype, chosen, device_type=device.type)


def measured_memory(arguments: argparse.Namespace, case: str, tokens: int, device: torch.device) -> list[dict]:
    """The row of a case."""
    trainer = build(arguments, case, tokens, device, Few(5 if CASES[case].get("train.cuda_graph") else 3))
    peaks: dict[str, int] = {}
    after_forward = [0]
    on_gpu = device.type == "cuda"

    def note(part: str) -> None:
        if on_gpu:
            peaks[part] = max(peaks.get(part, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def forward_ended(*_: object) -> None:
        if on_gpu:
            after_forward[0] = max(after_forward[0], torch.cuda.memory_allocated())
        note("forward")

    trainer.model.register_forward_hook(forward_ended)
    forward_backward, update = trainer.forward_backward, trainer.update

    def noting(function: Any, part: str) -> Any:
        def call(*values: Any) -> Any:
            note("between")
            result = function(*values)
            note(part)
            return result

        return call

    trainer.forward_backward = noting(forward_backward, "backward")
    trainer.update = noting(update, "optimizer")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(Enough):
        trainer.run()
    note("between")
    found = estimate(trainer.recipe, device)
    shared = peer_memory.shared_gpu_bytes()
    largest = torch.tensor([max(peaks.values(), default=0) + shared, after_forward[0]], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    peak = float(largest[0])
    parts = {name: round(getattr(found, name) / 2**30, 2) for name in found.__dataclass_fields__ if name != "reached"}
    row = {
        "layers": arguments.layers,
        "case": case,
        "tokens/GPU": tokens,
        "estimate GiB": round(found.total / 2**30, 2),
    }
    row |= {"peak GiB": round(peak / 2**30, 2), "shared GiB": round(shared / 2**30, 2)}
    row["estimate / peak"] = round(found.total / peak, 3) if peak else ""
    row["reserved GiB"] = round(torch.cuda.max_memory_reserved() / 2**30, 2) if on_gpu else ""
    row["reached in"] = max(peaks, key=lambda part: peaks[part]) if peaks else ""
    row["after forward GiB"] = round(float(largest[1]) / 2**30, 2)
    row["parts GiB"] = json.dumps(parts)
    if dist.get_rank() == 0:
        print("  " + ", ".join(f"{part} {bytes_ / 2**30:.2f}" for part, bytes_ in peaks.items()), flush=True)
    return [row]


# ---------------------------------------------------------------------------------------------------------- the run


def prepare(arguments: argparse.Namespace) -> None:
    """A config, a tokenizer and a text, which no step reads: rows are made."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    text = arguments.folder / "text.jsonl"
    if not text.exists():
        text.write_text("".join(json.dumps({"text": f"line {number} of a text"}) + "\n" for number in range(200)))
    folder = arguments.folder / f"model-{arguments.layers}"
    if not (folder / "tokenizer.json").exists():
        bench_recipe.make_model(folder, arguments.layers, None, tiny=arguments.tiny)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "speed", "memory"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="default: all that these ranks can run")
    parser.add_argument("--kernels", nargs="*", default=["rms_norm=auto", "rotary=compiled"], metavar="SEAM=NAME")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_trainer"), help="for configs and logs")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no further case is started")
    parser.add_argument("--commit", default="", help="of the code, for the rows")
    parser.add_argument("--started", type=int, default=os.getppid(), help=argparse.SUPPRESS)  # the same on all ranks
    return parser.parse_args()


def main() -> None:
    arguments, started = read_arguments(), time.perf_counter()
    if arguments.what == "prepare":
        prepare(arguments)
        return
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as a run does
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with launch.process_group() as device:
        import transformers

        world = dist.get_world_size()
        gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        stamp = {"commit": arguments.commit, "gpus": f"{world} {gpu}"}
        stamp["versions"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
        default = ("FSDP", "FSDP, graph", "EP2", "EP2, graph") if arguments.what == "speed" else tuple(CASES)
        cases = arguments.cases or [case for case in default if world > 1 or case in ON_ONE_GPU]
        if device.type == "cpu":
            cases = [case for case in cases if "graph" not in case]
        measure, path, columns = (
            (speed, SPEED, SPEED_COLUMNS) if arguments.what == "speed" else (measured_memory, MEMORY, MEMORY_COLUMNS)
        )
        for tokens in arguments.tokens:
            for case in cases:
                if is_late(started, arguments.budget):
                    break
                rows = measure(arguments, case, tokens, device)
                if dist.get_rank() == 0:
                    result_rows.append(path, columns, rows, **stamp)
                    for row in rows:
                        print(" | ".join(f"{row[name]}" for name in columns if name in row), flush=True)
                    print(f"  after {time.perf_counter() - started:.0f} s", flush=True)
                gc.unfreeze()
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def is_late(started: float, budget: float) -> bool:
    """Whether the time is up, by rank 0's clock."""
    late = torch.tensor(time.perf_counter() - started > budget, dtype=torch.int32)  # on the host: gloo
    dist.broadcast(late, src=0)
    return bool(late)


if __name__ == "__main__":
    main()
