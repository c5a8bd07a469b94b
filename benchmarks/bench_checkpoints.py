"""Loading weights from disk: speed relative to plain reading of the same files, and peak memory above the model's share.

    python benchmarks/bench_checkpoints.py --directory /scratch --layers 6             # the full model, on one rank
    python benchmarks/bench_checkpoints.py --directory /scratch --layers 15 --ranks 4 --ep 4
    python benchmarks/bench_checkpoints.py --directory /scratch --layers 20 --device cuda  # 26 GB, to a GPU

Writes files in the shape of Qwen3-30B-A3B (48 layers, here `--layers`) with one key per expert, in bf16, and removes them
afterwards. Each measurement is a separate process, with the files dropped from the page cache before it (with `--warm`: all in
it). With `--ranks` the process is rank 0 of that many, on torch's fake process group: it reads its shards and does not
communicate.

speed_ratio        relative to reading the same files one after the other into one reused buffer
ratios             the same, per round
speed_ratio_kept   relative to reading them into newly allocated memory, in large pages, as weights need it
page_cache         the share of the files that was in the page cache before a load
memory_at_hand     "yes": before each, the memory was allocated and freed once (`settle`); "no" with `--unsettled`, and to GPUs
Appends to benchmarks/results_checkpoints.csv.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import datetime
import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy

RESULTS = Path(__file__).with_name("results_checkpoints.csv")
COLUMNS: tuple[str, ...] = (
    "date", "torch", "transformers", "cpu_threads", "model", "files_gb", "ranks", "ep", "share_gib",
    "peak_above_share_gib", "read_gb", "load_s", "load_gb_s", "sequential_gb_s", "speed_ratio",
    "ratios", "speed_ratio_kept", "load_average", "page_cache", "memory_at_hand", "device",
)  # fmt: skip
BLOCK = 16 << 20
GIB = 1 << 30


def config(layers: int):
    """Qwen3-30B-A3B with fewer layers."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"],
        head_dim=128,  # pyright: ignore[reportCallIssue]  # taken, and not annotated
    )  # fmt: skip


def empty_model(layers: int):
    import torch

    from patchgen.runtime import registry

    cls = registry.find_model("qwen3_moe").load().Qwen3MoeForCausalLM
    with torch.device("meta"):
        return cls._from_config(config(layers), dtype=torch.bfloat16, attn_implementation="eager")


def make(directory: Path, layers: int) -> None:
    """Writes the files, tensor by tensor, with values that no disk can leave out."""
    import torch

    from patchgen.runtime.checkpoint.layout import disassemble
    from patchgen.runtime.checkpoint.lazy_tensors import leaf
    from patchgen.runtime.checkpoint.writing import FolderWriter, Output, plan_files

    model = empty_model(layers)
    leaves = {name: leaf(name, t.shape, t.dtype, name) for name, t in model.state_dict().items()}
    written = disassemble(model, leaves, layout=None, origin=None)
    files = plan_files(
        [Output(name, moved, torch.bfloat16) for name, moved in written.items()], max_file=4_000_000_000
    )
    writer = FolderWriter(directory, files)
    noise = (torch.randn(8 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    place = 0
    for file in files:
        for output in file.outputs:
            size = output.tensor.numel()
            place = (place + 4099) % (1 << 20)
            repeats = -(-(size + place) // noise.numel())
            values = noise.repeat(repeats) if repeats > 1 else noise
            writer.write(output, values[place : place + size])
    writer.close({"config.json": config(layers).to_json_string()})


def size_of(directory: Path) -> int:
    """Bytes of the weights."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def drop(directory: Path) -> None:
    """Removes the files from the page cache."""
    for file in directory.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached_share(directory: Path) -> float:
    """The part of the files that is in the page cache."""
    pages = cached_pages = 0
    for file in directory.glob("*.safetensors"):
        mapped = numpy.memmap(file, mode="r")
        states = numpy.zeros(-(-mapped.size // mmap.PAGESIZE), dtype=numpy.uint8)
        arguments = [
            ctypes.c_void_p(mapped.ctypes.data),
            ctypes.c_size_t(mapped.size),
            ctypes.c_void_p(states.ctypes.data),
        ]
        if ctypes.CDLL(None, use_errno=True).mincore(*arguments):
            raise OSError(ctypes.get_errno(), "mincore")
        pages += states.size
        cached_pages += int((states & 1).sum())
    return cached_pages / pages


def settle(num_bytes: int) -> None:
    """Makes the machine allocate this much memory, by touching and freeing it in another process.

    At most three quarters of the free memory: other processes may run, and files stay in the page cache. On a virtual
    machine the host reclaims freed memory and returns it page by page, which takes longer than reading a file. The first
    measurement, or one after imports of a few seconds, would include that time.
    """
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    num_bytes = min(num_bytes, int(fields["MemFree"].split()[0]) * 1024 * 3 // 4)
    code = (
        f"import mmap; memory = mmap.mmap(-1, {num_bytes}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "memory.madvise(mmap.MADV_HUGEPAGE)\n"
        f"for place in range(0, {num_bytes}, 4096): memory[place] = 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def read_sequentially(directory: Path, *, keep: bool, at_hand: bool) -> dict[str, float]:
    """Reads every file into one buffer, or, with `keep`, into newly allocated memory, as weights need it."""
    buffer = bytearray(BLOCK)
    total, buffers = 0, []
    if at_hand:
        settle(2 * size_of(directory))
    started, cpu = time.perf_counter(), time.process_time()
    for file in sorted(directory.glob("*.safetensors")):
        if keep:
            buffers.append(mmap.mmap(-1, file.stat().st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            buffers[-1].madvise(mmap.MADV_HUGEPAGE)
        with file.open("rb", buffering=0) as stream:
            place = 0
            while count := stream.readinto(memoryview(buffers[-1])[place : place + BLOCK] if keep else buffer):
                place += count
            total += place
    return {"gb": total / 1e9, "seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}


def load(directory: Path, layers: int, ranks: int, ep: int, device: str, *, at_hand: bool) -> dict[str, object]:
    """Rank 0's load. The model's share counts as host memory only on the CPU."""
    import torch

    from patchgen.runtime.checkpoint import load_pretrained
    from patchgen.runtime.checkpoint.placement import local_tensor
    from patchgen.runtime.parallel import ParallelConfig, sharding
    from patchgen.runtime.parallel.state import ParallelState

    model = empty_model(layers)
    if ranks > 1:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        sharding.shard_model(model, ParallelState.create(ParallelConfig.for_world(ranks, ep=ep), device))
        dist.all_gather_object = lambda target, value, group=None: target.__setitem__(0, value)  # nobody answers
    sharding.materialise(model, device)
    if at_hand:
        settle(2 * size_of(directory))
    before = peak_memory()
    cpu = time.process_time()
    report = load_pretrained(model, directory)
    cpu = time.process_time() - cpu
    share = sum(local_tensor(p).numel() * p.element_size() for p in model.parameters())
    if ranks == 1:
        check(model, directory)
    return {
        "share_gib": share / GIB,
        "before_gib": before / GIB,
        "peak_above_share_gib": (peak_memory() - (share if device == "cpu" else 0)) / GIB,
        "read_gb": report.num_bytes / 1e9,
        "seconds": report.seconds,
        "cpu_s": cpu,
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def peak_memory() -> int:
    """The peak host memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check(model, directory: Path) -> None:
    """Compares some loaded tensors with those of the safetensors library."""
    import torch
    from safetensors import safe_open

    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    for expert, half in ((0, 0), (77, 1), (127, 0)):
        key = f"model.layers.0.mlp.experts.{expert}.{('gate_proj', 'up_proj')[half]}.weight"
        with safe_open(directory / index[key], "pt") as file:
            loaded = model.model.layers[0].mlp.experts.gate_up_proj[expert].chunk(2)[half].cpu()
            assert torch.equal(loaded, file.get_tensor(key)), key


def in_a_process(*arguments: str) -> dict:
    """The JSON that this script prints in a separate process."""
    command = [sys.executable, __file__, *arguments]
    completed = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(completed.stdout.splitlines()[-1])


def is_settled(options: argparse.Namespace) -> bool:
    return options.device == "cpu" and not options.unsettled


def speed_of(measured: dict, size: str) -> float:
    """GB/s."""
    return measured[size] / measured["seconds"]


def measure(directory: Path, options: argparse.Namespace) -> dict[str, object]:
    """The median of a few rounds of reading and loading in turn."""
    import transformers

    shape = ["--directory", str(directory), "--layers", str(options.layers)]
    shape += ["--unsettled"] * options.unsettled
    shape += ["--ranks", str(options.ranks), "--ep", str(options.ep), "--device", options.device]
    loads, reads, keeps = [], [], []

    def run(part: str, measurements: list[dict]) -> None:
        if options.warm:
            subprocess.run(["cat", *map(str, directory.glob("*.safetensors"))], check=True, stdout=subprocess.DEVNULL)
        else:
            drop(directory)
        cached = cached_share(directory)
        measurements.append(in_a_process(*shape, "--part", part) | {"cached": cached})
        print(part, measurements[-1], flush=True)

    for _ in range(options.repeat):
        run("read", reads)
        run("load", loads)
    if options.device == "cpu":  # last: the next load would get the memory that it frees
        for _ in range(options.repeat):
            run("keep", keeps)
    sequential = statistics.median(read["gb"] / read["seconds"] for read in reads)
    speed = statistics.median(load["read_gb"] / load["seconds"] for load in loads)
    ratios = [speed_of(a, "read_gb") / speed_of(b, "gb") for a, b in zip(loads, reads, strict=True)]
    keep_speeds = [speed_of(keep, "gb") for keep in keeps]
    row = {
        "date": datetime.date.today().isoformat(),
        "torch": loads[0]["torch"],
        "transformers": transformers.__version__,
        "cpu_threads": os.cpu_count(),
        "model": f"Qwen3-30B-A3B, {options.layers} of 48 layers, bf16, per expert",
        "files_gb": round(reads[0]["gb"], 2),
        "ranks": options.ranks,
        "ep": options.ep,
        "share_gib": round(loads[0]["share_gib"], 2),
        "peak_above_share_gib": round(max(load["peak_above_share_gib"] for load in loads), 2),
        "read_gb": round(loads[0]["read_gb"], 2),
        "load_s": round(statistics.median(load["seconds"] for load in loads), 1),
        "load_gb_s": round(speed, 2),
        "sequential_gb_s": round(sequential, 2),
        "speed_ratio": round(statistics.median(ratios), 2),
        "ratios": " ".join(f"{ratio:.2f}" for ratio in ratios),
        "speed_ratio_kept": round(speed / statistics.median(keep_speeds), 2) if keep_speeds else "",
        "load_average": round(os.getloadavg()[0], 1),
        "page_cache": f"{'warm' if options.warm else 'cold'}: {statistics.median(load['cached'] for load in loads):.0%}",
        "memory_at_hand": "yes" if is_settled(options) else "no",
        "device": loads[0]["device"],
    }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="the folder to write the files to")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--warm", action="store_true", help="files in the page cache; they and the model must fit memory"
    )
    parser.add_argument("--unsettled", action="store_true", help="take memory as it comes")
    parser.add_argument("--keep", action="store_true", help="keep the files, and use existing ones")
    parser.add_argument("--part", choices=("read", "keep", "load"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part in ("read", "keep"):
        keep = options.part == "keep"
        print(json.dumps(read_sequentially(options.directory, keep=keep, at_hand=is_settled(options))))
        return
    if options.part == "load":
        sizes = options.layers, options.ranks, options.ep, options.device
        print(json.dumps(load(options.directory, *sizes, at_hand=is_settled(options))))
        return
    directory = options.directory / f"qwen3-30b-a3b-{options.layers}-layers"
    try:
        if not (directory / "config.json").is_file():
            make(directory, options.layers)
        row = measure(directory, options)
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        if is_new:
            table.writeheader()
        table.writerow(row)
    print(f"{platform.machine()}: " + ", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
