"""`patchgen train` of recipes/qwen3_moe_30b.yaml as users run it: a checkpoint, a kill, a resume, an export; from random weights.

    python benchmarks/bench_recipe.py --nproc 4 --layers 2 --folder runs/bench_recipe --set parallel.ep=4
    python benchmarks/bench_recipe.py --nproc 4 --layers 2 --folder runs/bench_recipe --prepare     # only what needs no GPU
    python benchmarks/bench_recipe.py --nproc 2 --tiny --folder runs/bench_recipe                   # that it runs, on the CPU

The recipe's values except those of `CHANGED`: fewer layers, so that a checkpoint is written in seconds; the sources of
Python's standard library with a tokenizer trained on them, since nothing is downloaded; a learning rate for random weights.

    first run     killed with SIGKILL, all of its processes, once a checkpoint is complete and `STEPS_AFTER` steps followed it
    second run    the same command, but that it saves at its end alone: goes on from the checkpoint to the last step, and exports
    compared      losses and norms of the steps that both runs took
    export        loaded by plain transformers, every tensor (`runtime/train/check_run.py`)
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "qwen3_moe_30b.yaml"
SOURCE = "builtin:stdlib"
VOCABULARY = 16_384  # of the tokenizer: merges of a few megabytes of text; the model may have more rows
CHANGED = {"train.steps": "30", "train.restarts": "0", "checkpoint.every": "12", "data.sources.0.path": SOURCE}
CHANGED |= {"optim.lr": "3e-4", "optim.warmup_steps": "5"}
TINY_CHANGED = {"data.tokens_per_batch": "512", "kernels.rms_norm": "null", "kernels.rotary": "null"}
STEPS_AFTER = 3
STEPS_NAME = "recipe_steps.csv"


class RecipeFailed(RuntimeError):
    """The recipe did not run as described; the message has the end of its log."""


def make_model(folder: Path, layers: int, rows: int | None, *, tiny: bool) -> None:
    """A config and a tokenizer where `model.source` looks for them; no weights."""
    from bench_train import MODEL, TINY, config_of

    from patchgen.runtime.data import DataConfig, SourceConfig, train_tokenizer

    sizes = (TINY if tiny else MODEL) | {"num_hidden_layers": layers, "max_window_layers": layers}
    vocabulary = 384 if tiny else VOCABULARY
    config = config_of(sizes | {"vocab_size": max(vocabulary, rows or sizes["vocab_size"])})
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    tokenizer = train_tokenizer(DataConfig(sources=(SourceConfig(path=SOURCE),)), vocab_size=vocabulary)
    tokenizer.save_pretrained(folder)


def read_data(arguments: argparse.Namespace) -> None:
    """Builds the token cache of the run where the ranks look for it."""
    from patchgen.runtime.data import build_loader
    from patchgen.runtime.train import recipe, setup

    loaded = recipe.load(RECIPE, recipe.parse_overrides(settings_of(arguments)))
    tokenizer = setup.data_parts(loaded).tokenizer
    build_loader(loaded.data, tokenizer=tokenizer, batch_index=0, num_batches=arguments.nproc)


def settings_of(arguments: argparse.Namespace) -> list[str]:
    """The changes of the recipe, for `--set`."""
    changed = {"model.source": str(arguments.folder / "model"), "log.directory": str(arguments.folder / "run")}
    changed |= CHANGED | (TINY_CHANGED if arguments.tiny else {})
    return [f"{key}={value}" for key, value in changed.items()] + arguments.set


def command_of(arguments: argparse.Namespace, *more: str) -> list[str]:
    """`patchgen train` of the recipe, with the changes."""
    command = [sys.executable, "-m", "patchgen.cli", "train", str(RECIPE), "--nproc", str(arguments.nproc), *more]
    return command + [part for setting in settings_of(arguments) for part in ("--set", setting)]


# ------------------------------------------------------------------------------------------ the two runs


def start(command: list[str], log: Path, changes: Mapping[str, str] | None = None) -> subprocess.Popen:
    """Starts the command in the root of the tree, in this environment with `changes`; its output is appended to `log`."""
    environment = {**os.environ, **(changes or {})}
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep)
    with log.open("a") as file:
        file.write(" ".join(command) + "\n")
        file.flush()
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)


def kill_all(process: subprocess.Popen) -> None:
    """Kills the process and all that it started; returns when they are gone."""
    try:
        parent = psutil.Process(process.pid)
        everyone = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in everyone:  # the parent first: it would start again what ends
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(everyone, timeout=30)


def newest_complete_step(run: Path) -> int | None:
    """The step of the newest checkpoint under its final name, which it gets when all of it is on the disk."""
    steps = [
        int(match[1]) for path in run.glob("checkpoints/step-*") if (match := re.fullmatch(r"step-(\d+)", path.name))
    ]
    return max(steps, default=None)


def run_and_kill(command: list[str], run: Path, log: Path, deadline: float) -> tuple[int, list[dict]]:
    """Starts the run and kills it once a checkpoint is complete and `STEPS_AFTER` steps followed; returns the checkpoint's step and
    the lines of the log so far.

    Raises:
        RecipeFailed: it ended by itself, or the steps did not come in time.
    """
    from patchgen.runtime.train import run_log

    process = start(command, log)
    try:
        while time.monotonic() < deadline:
            saved, lines = newest_complete_step(run), run_log.read(run)
            if saved is not None and lines and lines[-1]["step"] >= saved + STEPS_AFTER:
                kill_all(process)
                return saved, run_log.read(run)
            if process.poll() is not None:
                raise RecipeFailed(f"The first run ended by itself, with {process.returncode}.\n{end_of(log)}")
            time.sleep(0.05)
    finally:
        kill_all(process)
    raise RecipeFailed(f"The first run had no checkpoint and steps after it in time.\n{end_of(log)}")


def run_to_end(command: list[str], log: Path, deadline: float) -> None:
    """Runs a command to its end, and kills it at `deadline`.

    Raises:
        RecipeFailed: it failed, or took too long.
    """
    process = start(command, log)
    try:
        code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RecipeFailed(f"No time is left for {' '.join(command[1:4])}.\n{end_of(log)}") from None
    finally:
        kill_all(process)
    if code:
        raise RecipeFailed(f"{' '.join(command[1:4])} ended with {code}.\n{end_of(log)}")


def end_of(log: Path) -> str:
    """The last lines of a log."""
    return log.read_text(errors="replace")[-3000:]


# ------------------------------------------------------------------------------------------ what came of it


def compare(before: list[dict], after: list[dict], saved: int) -> dict:
    """Of the steps that both runs took after the checkpoint: the relative differences of losses and norms.

    Raises:
        RecipeFailed: there are none, or the steps up to the checkpoint changed.
    """
    first = {line["step"]: line for line in before if "loss" in line}
    second = {line["step"]: line for line in after if "loss" in line}
    if [first[step]["loss"] for step in sorted(first) if step <= saved] != [
        second[step]["loss"] for step in sorted(second) if step <= saved
    ]:
        raise RecipeFailed(f"The resumed run did not keep the losses of the steps up to its checkpoint, {saved}.")
    common_steps = sorted(step for step in first.keys() & second.keys() if step > saved)
    if not common_steps:
        raise RecipeFailed(f"No step after the checkpoint, {saved}, was taken by both runs.")
    comparison: dict = {"checkpoint of step": saved, "steps of both": common_steps, "last step": max(second)}
    for key in ("loss", "grad_norm"):
        apart = [abs(second[step][key] - first[step][key]) / abs(first[step][key]) for step in common_steps]
        comparison |= {
            f"{key}: relative difference of the first step after": apart[0],
            f"{key}: largest relative difference": max(apart),
        }
    return comparison


def write_steps(before: list[dict], after: list[dict], path: Path) -> None:
    """Writes the curve: the values of both runs per step."""
    first = {line["step"]: line for line in before if "loss" in line}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss, killed run", "loss, resumed run", "norm, killed", "norm, resumed", "seconds"])
        for line in after:
            old = first.get(line["step"], {})
            row = [line["step"], old.get("loss", ""), line["loss"], old.get("grad_norm", ""), line["grad_norm"]]
            writer.writerow([*row, round(line["seconds"], 3)])


def bench(arguments: argparse.Namespace) -> None:
    """The benchmark; figures are printed and written as they are measured.

    Raises:
        RecipeFailed: it did not run as described.
    """
    from patchgen.runtime.train import run_log

    out = Path(os.environ.get("OUT") or arguments.folder)
    run, log, began = arguments.folder / "run", out / "recipe.log", time.monotonic()
    deadline, figures = began + arguments.budget, Figures(out / "recipe.json")
    saved, before = run_and_kill(command_of(arguments), run, log, deadline)
    figures.add({"first run, s": round(time.monotonic() - began, 1)})
    resumed = time.monotonic()
    run_to_end([*command_of(arguments), "--set", "checkpoint.every=0"], log, deadline)
    figures.add({"second run, s": round(time.monotonic() - resumed, 1)})
    after = run_log.read(run)
    write_steps(before, after, out / STEPS_NAME)
    figures.add(compare(before, after, saved))
    losses = [line["loss"] for line in after if "loss" in line]
    figures.add({"loss of the first step": losses[0], "loss of the last step": losses[-1]})
    checked = time.monotonic()
    run_to_end([sys.executable, "-m", "patchgen.runtime.train.check_run", str(run)], log, deadline)
    figures.add({"export": end_of(log).strip().splitlines()[-1]})
    figures.add({"export loaded, s": round(time.monotonic() - checked, 1)})


class Figures:
    """Figures by name, on the terminal and in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._all = path, {}

    def add(self, figures: dict) -> None:
        self._all |= figures
        self._path.write_text(json.dumps(self._all, indent=1) + "\n")
        print("\n".join(f"{name}: {value}" for name, value in figures.items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, help="rows of embedding and head; default: the model's 151,936")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the model's config, the run and its checkpoints"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as patchgen train has it")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which it is ended")
    parser.add_argument(
        "--prepare", action="store_true", help="only the config, the tokenizer and the proof before a run"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not (arguments.folder / "model" / "tokenizer.json").exists():
        make_model(arguments.folder / "model", arguments.layers, arguments.vocabulary, tiny=arguments.tiny)
    try:
        if arguments.prepare:
            log = arguments.folder / "prepare.log"
            run_to_end(command_of(arguments, "--dry-run"), log, time.monotonic() + arguments.budget)
            read_data(arguments)
            return 0
        bench(arguments)
    except RecipeFailed as error:
        print(f"The recipe failed: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
