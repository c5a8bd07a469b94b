"""Checkpoints on GPUs: a round trip in bf16, and how much of an asynchronous save overlaps with training.

    torchrun --nproc-per-node 1 benchmarks/bench_checkpoints_gpu.py --directory /scratch
    torchrun --nproc-per-node 2 benchmarks/bench_checkpoints_gpu.py --directory /scratch --ep 2

round trip   random weights saved by upstream's class -> loaded by all ranks -> exported: fingerprints of both, and
             logits of both by plain transformers in a separate process, bit for bit
saves        seconds per step without a save; of every step from the call of an asynchronous save until it is on the
             disk, that call included; then the state is loaded again and compared with what it was at the call

A slice of Qwen3-30B-A3B (`--layers`); fp32 parameters and AdamW, bf16 compute. Appends to results_checkpoints_gpu.csv
(in $OUT, where that is set). Needs room for two checkpoints: 24 bytes per parameter, 45 GB with two layers.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

RESULTS = "results_checkpoints_gpu.csv"


def logits_of(folder: str) -> torch.Tensor:
    """The logits of plain transformers, in bf16."""
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  # with loading info
        folder, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    wrong = {kind: info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]}
    assert not wrong, wrong
    ids = torch.randint(0, model.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.to(device).eval()(input_ids=ids.to(device)).logits.cpu()


def compare_logits(original: str, export: str) -> None:
    expected, got = logits_of(original), logits_of(export)
    assert torch.equal(got, expected), f"logits differ by {(got - expected).abs().max()}"
    assert not any(name.startswith("patchgen") for name in sys.modules)
    print("same logits")


def round_trip(directory: Path, sizes: dict, setting, ep: int) -> dict[str, object]:
    import bench_parallel
    from transformers import Qwen3MoeConfig
    from transformers import Qwen3MoeForCausalLM as Upstream

    from patchgen.runtime.checkpoint import export_pretrained, fingerprint, load_pretrained
    from patchgen.runtime.parallel import ParallelConfig, sharding
    from patchgen.runtime.parallel.state import ParallelState

    rank = dist.get_rank()
    original, export = directory / "original", directory / "export"
    if rank == 0:
        with torch.device(setting.device):
            upstream = Upstream._from_config(Qwen3MoeConfig(**sizes), dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in upstream.parameters():
                parameter.normal_(0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
        upstream.save_pretrained(original)
        del upstream
    dist.barrier()
    state = ParallelState.create(ParallelConfig.for_world(dist.get_world_size(), ep=ep), setting.device)
    model = bench_parallel.build(sizes, setting).to(torch.bfloat16)
    assert isinstance(model, PreTrainedModel)
    sharding.shard_model(model, state)
    sharding.materialise(model, setting.device)
    on_gpu = setting.device == "cuda"
    report = load_pretrained(model, original)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    export_pretrained(model, export, source=original)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    del model
    row: dict[str, object] = {"load s": round(report.seconds, 1), "export s": round(seconds, 1)}
    row["export peak / largest tensor"] = round(peak / largest, 2)
    if rank == 0:
        print(report)
        prints = fingerprint(original), fingerprint(export)
        assert prints[0] == prints[1], "the fingerprints differ"
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        command = [sys.executable, __file__, "--compare", str(original), str(export)]
        completed = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert completed.returncode == 0, completed.stderr
        row["round trip"] = f"{len(prints[0])} equal fingerprints, {completed.stdout.split(chr(10))[-2]}"
    dist.barrier()
    return row


def checksums(model, optimizer) -> dict[str, int]:
    """Of this rank's bits: a sum of integers, so the order does not matter."""
    sums = {}
    for name, parameter in model.named_parameters():
        fields = {"": parameter, **optimizer.state.get(parameter, {})}
        for field, value in fields.items():
            local = (value.to_local() if hasattr(value, "to_local") else value).detach()
            sums[f"{name} {field}"] = int(local.contiguous().view(-1).view(torch.int32).sum(dtype=torch.int64))
    return sums


def sharded_model(sizes: dict, setting, state) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    import bench_parallel

    from patchgen.runtime.parallel import checkpointing, sharding

    model = bench_parallel.build(sizes, setting)
    checkpointing.apply(model, "full")
    options = sharding.ShardingOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharding.shard_model(model, state, options=options)
    sharding.materialise(model, setting.device)
    bench_parallel.fill(model)
    return model, torch.optim.AdamW(sharding.optimizer_groups(model), lr=1e-5, fused=setting.device == "cuda")


def saves(directory: Path, sizes: dict, setting, arguments: argparse.Namespace) -> dict[str, object]:
    import bench_parallel

    from patchgen.runtime.checkpoint import Checkpointer
    from patchgen.runtime.parallel import ParallelConfig, loss
    from patchgen.runtime.parallel.state import ParallelState

    state = ParallelState.create(ParallelConfig.for_world(dist.get_world_size(), ep=arguments.ep), setting.device)
    model, optimizer = sharded_model(sizes, setting, state)
    inputs = bench_parallel.make_batch(arguments.tokens, state, sizes, arguments.tokens, 0, setting.device)
    items = loss.count_items([inputs], setting.device)

    def step(before=None) -> float:
        bench_parallel.synchronise(setting)
        started = time.perf_counter()
        if before is not None:
            before()
        bench_parallel.train_step(model, inputs, optimizer, state, items)
        bench_parallel.synchronise(setting)
        return time.perf_counter() - started

    checkpointer = Checkpointer(directory / "run", keep=1)

    def save(number: int) -> None:
        checkpointer.save(number, model=model, optimizer=optimizer, extra_state={"shared": {"step": number}})

    for _ in range(3):
        step()
    first = step(lambda: save(1))  # allocates the pinned buffers
    checkpointer.wait()
    normal = [step() for _ in range(arguments.steps)]
    known = checksums(model, optimizer)
    started = time.perf_counter()
    during = [step(lambda: save(2))]
    while any_saving(checkpointer, setting):
        during.append(step())
    checkpointer.wait()
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in (directory / "run" / "step-00000002").iterdir()) / 1e9
    del model, optimizer
    model, optimizer = sharded_model(sizes, setting, state)
    loaded = checkpointer.load(model=model, optimizer=optimizer)
    assert loaded["shared"] == {"step": 2}
    now = checksums(model, optimizer)
    differing = [name for name in known if known[name] != now.get(name)]
    assert now.keys() == known.keys() and not differing, f"the saved state is not that of the call: {differing[:5]}"
    mean, normal_mean = statistics.fmean(during), statistics.fmean(normal)
    return {
        "tokens per GPU": arguments.tokens,
        "checkpoint GB": round(size, 1),
        "s/step": round(normal_mean, 4),
        "s/step with the first save": round(first, 3),
        "s/step during a save": round(mean, 4),
        "ratio": round(mean / normal_mean, 3),
        "s/step with the call": round(during[0], 4),
        "worst other step / normal": round(max(during[1:], default=mean) / normal_mean, 3),
        "steps during the save": len(during),
        "save s": round(seconds, 1),
        "loaded state": "bit-identical",
    }


def any_saving(checkpointer, setting) -> bool:
    """Whether any rank is still saving, equal on all ranks."""
    flag = torch.tensor(float(checkpointer.is_saving), device=setting.device)
    dist.all_reduce(flag)
    return bool(flag)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--directory", type=Path, help="scratch space; files written there are removed")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare:
        compare_logits(*arguments.compare)
        return
    import bench_parallel

    from patchgen.runtime import attention, seams
    from patchgen.runtime.parallel import gloo_groups

    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gloo_groups.use_one_worker()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    attention.register()
    chosen = {"fused_moe": "torch", "causal_lm_loss": "chunked"}
    setting = bench_parallel.Setting(arguments.device, "patchgen_flash_varlen" if on_gpu else "patchgen_sdpa", chosen)
    seams.configure(**chosen)
    sizes = (bench_parallel.TINY if arguments.tiny else bench_parallel.SLICE) | {
        "num_hidden_layers": arguments.layers,
        "max_window_layers": arguments.layers,
    }
    scratch = arguments.directory / "bench-checkpoints-gpu"
    row: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "gpus": f"{dist.get_world_size()} {torch.cuda.get_device_name() if on_gpu else 'cpu'}",
        "layers": arguments.layers,
        "ep": arguments.ep,
    }
    try:
        row |= round_trip(scratch, sizes, setting, arguments.ep)
        if on_gpu:
            torch.cuda.empty_cache()
        row |= saves(scratch, sizes, setting, arguments)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    if dist.get_rank() == 0:
        print("\n".join(f"| {name} | {value} |" for name, value in row.items()), flush=True)
        target = Path(os.environ.get("OUT", Path(__file__).parent)) / RESULTS
        is_new = not target.exists()
        with target.open("a", newline="") as file:
            table = csv.DictWriter(file, list(row))
            if is_new:
                table.writeheader()
            table.writerow(row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
