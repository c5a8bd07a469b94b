"""Several GPUs of one host in a given time: `bench_train.py` in the layouts that they allow, and `bench_recipe.py`; one command.

    python benchmarks/bench_scaling.py --gpus 4 --budget 560
    python benchmarks/bench_scaling.py --gpus 2 --budget 600 --tiny --tokens 64 128       # that it runs, on the CPU

first        FSDP and EP through peer memory, as CUDA graphs and without, and transformers: what a table needs most
then         the recipe: a checkpoint, a kill, a resume, an export
what is left SP, EP with SP, and exchanges by collectives

A case that kills its process, or reports nothing for `--silence` seconds, loses only its own result: the process is ended, and
another one continues with the next case. Rows are written to a file as they are measured; the table is printed last.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from bench_recipe import end_of, kill_all, start
from bench_train import CASE_COLUMNS, COLUMNS, LAYOUTS, TRANSFORMERS, compare, write
from case_rows import CaseRows

HERE = Path(__file__).parent
RECIPE_SECONDS = 165.0
KERNELS = ["rms_norm=auto", "rotary=compiled"]


@dataclass(frozen=True)
class CaseGrid:
    """Cases of one `bench_train.py`: each layout at each length; ours recomputes layers above `recompute_above` tokens."""

    layouts: tuple[str, ...]
    tokens: tuple[int, ...]
    recompute_above: int
    options: tuple[str, ...] = field(default=())

    def remaining(self, rows: list[dict]) -> set[tuple[str, str, int]]:
        """(layout, checkpointing, length) of the cases that no row has."""
        return self.all_cases() - {(row_layout(row), row["ckpt"], row["tokens/GPU"]) for row in rows}

    def all_cases(self) -> set[tuple[str, str, int]]:
        return {(name, self.mode(name, tokens), tokens) for name in self.layouts for tokens in self.tokens}

    def mode(self, name: str, tokens: int) -> str:
        """The activation checkpointing that `bench_train.py` chooses; transformers recomputes above the shortest length."""
        return "full" if tokens > (min(self.tokens) if name == TRANSFORMERS else self.recompute_above) else "none"

    def command(self, gpus: int, rows_file: Path, budget: float) -> list[str]:
        """`bench_train.py` under torchrun."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        command += [str(HERE / "bench_train.py"), "--rows", str(rows_file), "--budget", f"{budget:.0f}"]
        command += ["--layouts", *self.layouts, "--tokens", *map(str, self.tokens)]
        command += ["--checkpoint-above", str(min(self.tokens)), "--our-checkpoint-above", str(self.recompute_above)]
        return command + list(self.options)


def grids_of(gpus: int, tokens: tuple[int, ...], options: tuple[str, ...]) -> tuple[CaseGrid, CaseGrid]:
    """The table, and what may follow it: layouts with SP, and exchanges by collectives."""
    full, half = f"EP{gpus}", f"EP{gpus // 2}"
    replayed = ("FSDP, graph", f"{half}, peer memory, graph", f"{full}, peer memory, graph")
    table = (*replayed, TRANSFORMERS, "FSDP", f"{half}, peer memory", f"{full}, peer memory")
    more = (f"{full} x SP2, peer memory", "SP2", f"{half} x SP2, peer memory", full, "FSDP, collectives")
    median_tokens = sorted(tokens)[len(tokens) // 2]
    first, second = (
        CaseGrid(tuple(name for name in names if name in LAYOUTS), tokens, median_tokens, options)
        for names in (table, more)
    )
    return first, second


def grid_with_recomputing(grid: CaseGrid, rows: list[dict]) -> CaseGrid | None:
    """The first two layouts, with recomputing, at the lengths at which one of them has no result without."""
    completed_cases = {
        (row_layout(row), row["tokens/GPU"]) for row in rows if row["ckpt"] == "none" and "loss 1" in row
    }
    two_layouts = replace(grid, layouts=grid.layouts[:2])
    cases = {(name, tokens) for name, mode, tokens in two_layouts.all_cases() if mode == "none"}
    missing = {tokens for _, tokens in cases - completed_cases}
    return replace(two_layouts, tokens=tuple(sorted(missing)), recompute_above=0) if missing else None


def row_layout(row: dict) -> str:
    """The name of the layout as `bench_train.py` takes it."""
    return TRANSFORMERS if row["who"] == TRANSFORMERS else row["layout"]


# --------------------------------------------------------------------------------------------- measuring


def measure(grid: CaseGrid, gpus: int, rows_file: Path, log: Path, deadline: float, max_silence: float) -> None:
    """Starts processes until every case of the grid was started, the time is up, or one starts none."""
    while (before := grid.remaining(last_rows(rows_file))) and time.monotonic() < deadline - 30:
        how = run_watched(
            grid.command(gpus, rows_file, deadline - 20 - time.monotonic()), rows_file, log, deadline, max_silence
        )
        after = grid.remaining(last_rows(rows_file))
        print(f"bench_train: started {len(before) - len(after)} cases; {how}", flush=True)
        if after == before:
            print(end_of(log), flush=True)
            return


def run_watched(command: list[str], rows_file: Path, log: Path, deadline: float, max_silence: float) -> str:
    """Runs a command to its end, the deadline, or until `rows_file` has not grown for `max_silence` seconds; returns which."""
    process = start(command, log)
    size, heard = -1, time.monotonic()
    try:
        while process.poll() is None:
            now = time.monotonic()
            if rows_file.exists() and rows_file.stat().st_size != size:
                size, heard = rows_file.stat().st_size, now
            if now > deadline:
                return "ended by the deadline"
            if now - heard > max_silence:
                return f"ended after {max_silence:.0f} s of silence"
            time.sleep(0.2)
        return f"exit status {process.returncode}"
    finally:
        kill_all(process)


def recipe_settings(rows: list[dict], gpus: int) -> list[str]:
    """The settings that the recipe gets: experts over all GPUs and shards through peer memory, as far as the cases with these have
    results."""
    measured = {row_layout(row) for row in rows if "loss 1" in row}
    settings = [f"parallel.ep={gpus if f'EP{gpus}, peer memory' in measured else 1}"]
    return settings if "FSDP" in measured else [*settings, "parallel.shard_exchange=collectives"]


def run_recipe(arguments: argparse.Namespace, out: Path, settings: list[str], budget: float) -> None:
    """Runs `bench_recipe.py`, whose figures are printed as they come."""
    more = [word for setting in settings for word in ("--set", setting)]
    command = recipe_command(arguments, "--budget", f"{budget:.0f}", *more)
    print(f"the recipe with {', '.join(settings)}", flush=True)
    process = subprocess.Popen(command, env=os.environ | {"OUT": str(out)})
    try:
        process.wait(timeout=budget + 10)
    except subprocess.TimeoutExpired:
        print("The recipe did not end in time.", flush=True)
    finally:
        kill_all(process)


def recipe_command(arguments: argparse.Namespace, *more: str) -> list[str]:
    """`bench_recipe.py` with what both of its calls need."""
    command = [sys.executable, str(HERE / "bench_recipe.py"), "--nproc", str(arguments.gpus)]
    command += ["--layers", str(arguments.recipe_layers), "--folder", str(arguments.folder)]
    command += ["--vocabulary", str(arguments.recipe_vocabulary)] if arguments.recipe_vocabulary else []
    return command + (["--tiny"] if arguments.tiny else []) + list(more)


# ---------------------------------------------------------------------------------------------- reporting


def report(rows: list[dict], gpus: int) -> None:
    """Prints the table, by length, and what the first steps differ in."""
    problems = compare(rows)
    columns = COLUMNS[3:]
    print(" | ".join(columns))
    for row in rows:
        print(" | ".join(str(row.get(column, "")) for column in columns))
    for tokens in sorted({row["tokens/GPU"] for row in rows}):
        at = {row_layout(row): row for row in rows if row["tokens/GPU"] == tokens and "loss 1" in row}
        plain, experts = at.get("FSDP"), at.get(f"EP{gpus}, peer memory")
        if plain and experts:
            print(f"EP{gpus} to FSDP at {tokens}: {experts['tokens/s/GPU'] / plain['tokens/s/GPU']:.2f}")
    print("\n".join(problems) or agreement(rows), flush=True)


def agreement(rows: list[dict]) -> str:
    """What rows without a problem agree with."""
    peers = sorted({row["who"] for row in rows if row["who"] != "ours" and "loss 1" in row})
    return (
        f"first steps agree with those of {' and '.join(peers)}" if peers else "no peer's first step to compare with"
    )


def last_rows(path: Path) -> list[dict]:
    """The last row of each case, by length."""
    return sorted(CaseRows(CASE_COLUMNS, result="s/step", path=path, writes=False), key=lambda row: row["tokens/GPU"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all of it")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--layers", type=int, help="instead of as many as fit")
    parser.add_argument("--recipe-layers", type=int, default=2)
    parser.add_argument("--recipe-vocabulary", type=int, help="default: the model's")
    parser.add_argument("--recipe-seconds", type=float, default=RECIPE_SECONDS)
    parser.add_argument(
        "--silence", type=float, default=90.0, help="seconds without a row after which a process is ended"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed, of each case")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench_scaling"), help="for the recipe's run; emptied by you"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    out = Path(os.environ.get("OUT") or arguments.folder)
    out.mkdir(parents=True, exist_ok=True)
    rows_file, log = out / "rows.jsonl", out / "bench_train.log"
    options = ["--steps", str(arguments.steps), "--warm-up", str(arguments.warm_up)] + (
        ["--layers", str(arguments.layers)] if arguments.layers else []
    )
    options += ["--tiny", "--device", "cpu"] if arguments.tiny else ["--kernels", *KERNELS]
    first, more = grids_of(arguments.gpus, tuple(arguments.tokens), tuple(options))
    end = began + arguments.budget
    print(
        f"{arguments.gpus} of {torch.cuda.device_count()} GPUs, {arguments.budget:.0f} s: the table, the recipe, more",
        flush=True,
    )

    prepared = subprocess.Popen(
        ["nice", *recipe_command(arguments, "--prepare")]
    )  # on the CPU, beside the first cases
    try:
        measure(first, arguments.gpus, rows_file, log, end - arguments.recipe_seconds, arguments.silence)
        if (with_recomputing := grid_with_recomputing(first, last_rows(rows_file))) is not None:
            measure(
                with_recomputing, arguments.gpus, rows_file, log, end - arguments.recipe_seconds, arguments.silence
            )
        prepared.wait(timeout=30)
    except subprocess.TimeoutExpired:
        print("What the recipe needs was not prepared in time.", flush=True)
    finally:
        kill_all(prepared)
    report(last_rows(rows_file), arguments.gpus)
    print(f"after {time.monotonic() - began:.0f} s", flush=True)
    settings = recipe_settings(last_rows(rows_file), arguments.gpus)
    run_recipe(arguments, out, settings, end - time.monotonic())
    print(f"after {time.monotonic() - began:.0f} s", flush=True)
    measure(more, arguments.gpus, rows_file, log, end, arguments.silence)
    latest_rows = last_rows(rows_file)
    report(latest_rows, arguments.gpus)
    write(latest_rows, arguments.gpus)
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
