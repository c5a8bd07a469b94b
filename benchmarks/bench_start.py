"""From the command to the second step: `patchgen train` of 12 layers of Qwen3-30B's width, with empty and with warm caches.

    python benchmarks/bench_start.py --nproc 2 --layers 12 --set parallel.ep=2
    python benchmarks/bench_start.py --nproc 2 --tiny                                # that it runs, on the CPU

The recipe of `bench_recipe.py` from random weights, on text of this machine's Python; a run is killed after `--steps` steps, with
nothing saved. Caches: the proof before a run, tokens, and compiled kernels, all below `--folder` (HOME is set to it).
`--samples` also prints where each process was, as a timeline (`stack_samples.py`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import bench_recipe
import result_rows
import stack_samples
import torch
import transformers

from patchgen.runtime.train import run_log

RESULTS = Path(__file__).with_name("results_start.csv")
COLUMNS = ("date", "commit", "versions", "gpus", "layers", "recipe", "caches", "to step 1 began s", "step 1 s", "step 2 s",
           "to step 2 ended s", "later steps s", "MFU %", "parts")  # fmt: skip


def run(arguments: argparse.Namespace, name: str) -> dict:
    """One start; the figures of a row."""
    folder = arguments.folder / f"run-{name}"
    command = [*bench_recipe.command_of(arguments), "--set", f"log.directory={folder}"]
    environment = {"HOME": str(arguments.folder.resolve())}
    if arguments.samples:
        environment |= stack_samples.environment(arguments.folder.resolve() / f"samples-{name}")
        environment["HOME"] = str(arguments.folder.resolve())
    log = Path(os.environ.get("OUT") or arguments.folder) / f"start-{name}.log"
    began = time.time()
    process = bench_recipe.start(command, log, environment)
    ends: dict[int, float] = {}
    lines: list[dict] = []
    try:
        while time.time() - began < arguments.budget and process.poll() is None:
            lines = run_log.read(folder)
            for line in lines:
                ends.setdefault(line["step"], time.time())
            if lines and lines[-1]["step"] >= arguments.steps:
                break
            time.sleep(0.01)
    finally:
        bench_recipe.kill_all(process)
    if arguments.samples:  # also of a start that came to no step
        print("\n".join(stack_samples.timeline(arguments.folder.resolve() / f"samples-{name}")), flush=True)
    if len(lines) < 2:
        raise bench_recipe.RecipeFailed(f"{name}: no second step.\n{bench_recipe.end_of(log)}")
    later = sorted(ends)[3:]
    figures = {
        "caches": name,
        "step 1 s": round(lines[0]["seconds"], 2),
        "step 2 s": round(ends[2] - ends[1], 2),
        "to step 1 began s": round(ends[1] - began - lines[0]["seconds"], 2),
        "to step 2 ended s": round(ends[2] - began, 2),
    }
    if len(later) > 1:  # by the clock: from one line of the log to another
        figures["later steps s"] = round((ends[later[-1]] - ends[later[0]]) / (later[-1] - later[0]), 4)
    mfus = [line["mfu"] for line in lines[3:] if line.get("mfu")]
    figures["MFU %"] = round(100 * statistics.median(mfus), 1) if mfus else ""
    parts = [
        line.removeprefix("start ")
        for line in log.read_text(errors="replace").splitlines()
        if line.startswith("start ")
    ]
    figures["parts"] = parts[-1].strip() if parts else ""
    print(bench_recipe.end_of(log)[-1200:], flush=True)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench_start"), help="for config, tokenizer, caches, runs"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as patchgen train has it")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU")
    parser.add_argument("--names", nargs="+", default=["empty", "warm"], help="of the starts, one after the other")
    parser.add_argument("--steps", type=int, default=12, help="after which a run is killed")
    parser.add_argument("--samples", action="store_true", help="print where processes were")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for one start")
    parser.add_argument("--prepare", action="store_true", help="only the config and the tokenizer")
    parser.add_argument("--commit", default="", help="of the code, for the rows")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    text = arguments.folder / "text.jsonl"
    if not text.exists():
        write_text(text)
    if not (arguments.folder / "model" / "tokenizer.json").exists():
        bench_recipe.make_model(arguments.folder / "model", arguments.layers, None, tiny=arguments.tiny)
    if arguments.prepare:
        return 0
    batches = [setting for setting in arguments.set if setting.startswith("train.batches_per_step=")]
    shown = ", ".join(arguments.set) or "as it is"
    arguments.set += [
        f"data.sources.0.path={text}",
        f"data.cache_dir={arguments.folder / 'cache'}",
        "train.restarts=0",
    ]
    arguments.set += ["checkpoint.every=0", "checkpoint.export=false", "parallel.activation_checkpointing=none"]
    arguments.set += [] if batches else [f"train.batches_per_step={arguments.nproc}"]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    stamp = {
        "commit": arguments.commit,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "gpus": f"{arguments.nproc} {gpu}",
        "layers": arguments.layers,
        "recipe": shown,
    }
    for name in arguments.names:
        shutil.rmtree(arguments.folder / f"run-{name}", ignore_errors=True)
        try:
            row = run(arguments, name)
        except bench_recipe.RecipeFailed as error:
            print(f"The start failed: {error}", flush=True)
            return 1
        result_rows.append(RESULTS, COLUMNS, [row], **stamp)
        print(" | ".join(f"{column} {value}" for column, value in row.items()), flush=True)
    return 0


def write_text(path: Path) -> None:
    """The sources of Python's standard library, some megabytes of them, as samples."""
    import json
    import sysconfig

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    with path.open("w") as file:
        for source in files:
            file.write(json.dumps({"text": source.read_text(encoding="utf-8", errors="replace")}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
