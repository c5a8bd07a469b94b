"""The log of a run: `steps.jsonl`, `experts.json`, `recipe.yaml`, `report.txt`, `summary.json`, and the recipe's trackers.

{"step": 1, "loss": 8.31, "grad_norm": 2.4, "lr": 0.0001, "tokens": 8192, ...}
{"step": 20, "eval_loss": 5.02, "labels": 16210}
{"step": 20, "samples": [{"prompt": "The capital of France", "text": " is Paris."}]}

With several data sources an entry has their figures as well: `"sources": {"chats": {"tokens": 812, "labels": 390,
"loss": 1.93}, ...}`, or `eval_sources` for an evaluation. With experts it has `expert_load`, the load of the busiest one, and
`expert_shares`, the share of each layer's K busiest; what each expert got in the last reading is in `experts.json`:

{"step": 20, "per_token": 2, "counts": {"model.layers.0.mlp.experts": [1031, 977, ...], ...}}
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import yaml

from patchgen.runtime.checkpoint.small_files import free_space
from patchgen.runtime.train.recipe import RecipeError
from patchgen.runtime.train.records import Evaluation, Listener, RunStart, Sample, StepRecord, Summary, TrainingStopped
from patchgen.runtime.train.sources import SourceFigures

STEPS, SUMMARY, EXPERTS = "steps.jsonl", "summary.json", "experts.json"
TRACKED = "wandb_id"
SHOWN_BYTES = 60
"""Bytes of a broken line that an error shows."""


class RunLog(Listener):
    """Writes the files; a resumed run drops the entries of steps that are repeated."""

    def __init__(self, directory: Path, *, on_failed: str = "stop") -> None:
        self.directory, self.on_failed = directory, on_failed
        self._file: TextIO | None = None

    def on_start(self, start: RunStart) -> None:
        with writing(self.directory, None):
            self.directory.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("recipe.yaml", yaml.safe_dump(start.recipe, sort_keys=False)),
            ("report.txt", start.report + "\n"),
        ):
            with writing(self.directory / name, self.on_failed) as path:
                path.write_text(text, encoding="utf-8")
        earlier = [entry for entry in read(self.directory) if entry["step"] <= start.first_step]
        path = self.directory / STEPS
        replacement = path.with_suffix(".new")
        with writing(path, None):  # without this file there is no log
            replacement.write_text("".join(json.dumps(entry) + "\n" for entry in earlier), encoding="utf-8")
            replacement.replace(path)
            self._file = path.open("a", buffering=1, encoding="utf-8")  # flushed after every line

    def on_step(self, record: StepRecord) -> None:
        entry = {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
        if record.experts is not None:
            self._replace(EXPERTS, {"step": record.step, **entry.pop("experts")})
            entry["expert_shares"] = record.experts.shares
        self._write(entry)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        values = dataclasses.asdict(evaluation)
        entry = {"step": values["step"], "eval_loss": values["loss"], "labels": values["labels"]}
        self._write(entry | ({"eval_sources": values["sources"]} if values["sources"] else {}))

    def on_samples(self, step: int, samples: list[Sample]) -> None:
        self._write({"step": step, "samples": [dataclasses.asdict(sample) for sample in samples]})

    def on_end(self, summary: Summary) -> None:
        with writing(self.directory / SUMMARY, self.on_failed) as path:
            path.write_text(json.dumps(dataclasses.asdict(summary), indent=1) + "\n", encoding="utf-8")

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk was already reported by `writing`
                self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        with writing(self.directory / STEPS, self.on_failed):
            assert self._file is not None, "on_start opens the file"
            self._file.write(json.dumps(entry) + "\n")

    def _replace(self, name: str, value: dict[str, Any]) -> None:
        """Replaces a file as a whole, so that no reader sees half of it."""
        with writing(self.directory / name, self.on_failed) as path:
            path.with_suffix(".new").write_text(json.dumps(value), encoding="utf-8")
            path.with_suffix(".new").replace(path)


@contextlib.contextmanager
def writing(path: Path, on_failed: str | None) -> Iterator[Path]:
    """A failed write stops the run or is skipped with a warning, as `checkpoint.on_failed` says.

    Args:
        on_failed: of the recipe; None: the run needs this file, and stops whatever the recipe says.

    Raises:
        TrainingStopped: with the path and the free space there.
    """
    try:
        yield path
    except OSError as error:
        message = f"{path} cannot be written ({free_space(path.parent)}): {error.strerror or error}."
        if on_failed is None:
            raise TrainingStopped(f"{message} To fix: free space there, or name another log.directory.") from error
        if on_failed == "stop":
            raise TrainingStopped(f"{message} To train without it, set checkpoint.on_failed: continue.") from error
        warnings.warn(f"{message} The run continues without it.", stacklevel=3)


def read(directory: Path) -> list[dict[str, Any]]:
    """The log entries of a run so far, without a last line that a crash truncated.

    Raises:
        TrainingStopped: naming file and line: another line is not an entry.
    """
    path = directory / STEPS
    if not path.is_file():
        return []
    content = path.read_bytes()
    lines, is_truncated = content.splitlines(), not content.endswith(b"\n")
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line.decode("utf-8"))
            if not isinstance(entry, dict) or "step" not in entry:
                raise ValueError("expected an object with a step")
        except ValueError as error:  # also of json and of UTF-8
            if is_truncated and number == len(lines):
                break
            raise TrainingStopped(
                f"{path}, line {number}, is not an entry of the log ({error}): {line[:SHOWN_BYTES]!r}. "
                "To fix: delete this line."
            ) from error
        entries.append(entry)
    return entries


def read_experts(directory: Path) -> dict[str, Any] | None:
    """The last reading of `router_loads.ExpertLoads`, as a dict with its step; None if there was none."""
    path = directory / EXPERTS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def num_skipped(directory: Path, last_step: int) -> int:
    """How many of the steps up to `last_step` were skipped, as the log has them."""
    return sum(bool(entry.get("skipped")) for entry in read(directory) if entry["step"] <= last_step)


def read_summary(directory: Path) -> dict[str, Any] | None:
    """The `records.Summary` of the run in this directory, as a dict, as of when it last ended; None if it never did."""
    path = directory / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def require_tracker(kind: str) -> ModuleType:
    """Imports a tracker's package; raises RecipeError if it is not installed."""
    packages = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
    try:
        return importlib.import_module(packages[kind])
    except ImportError as error:
        raise RecipeError(
            f"log.trackers names '{kind}', which is not installed ({error}). `pip install {kind}`, or remove it."
        ) from error


class Tracker(Listener):
    """Logs the numbers of each step and evaluation to TensorBoard, wandb or trackio."""

    def __init__(self, kind: str, project: str, directory: Path) -> None:
        self.kind, self.project, self.directory = kind, project, directory
        self._package = require_tracker(kind)
        self._is_open = False

    def on_start(self, start: RunStart) -> None:
        if self.kind == "tensorboard":
            self._writer = self._package.SummaryWriter(self.directory / "tensorboard", purge_step=start.first_step + 1)
        else:
            # wandb: one run over restarts and requeues; steps that it has already it leaves as they are.
            options: dict[str, Any] = {}
            if self.kind == "wandb":
                options = {"id": tracked_id(self.directory), "resume": "allow", "dir": str(self.directory)}
            self._package.init(project=self.project, name=start.name, config=start.recipe, **options)
        self._is_open = True

    def on_step(self, record: StepRecord) -> None:
        values = {f"train/{name}": value for name, value in dataclasses.asdict(record).items() if _is_plottable(value)}
        self._write(values | _source_values("train", record.sources), record.step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._write({"eval/loss": evaluation.loss} | _source_values("eval", evaluation.sources), evaluation.step)

    def close(self) -> None:
        if self._is_open:  # also after errors, so that logged values are flushed
            self._writer.close() if self.kind == "tensorboard" else self._package.finish()

    def _write(self, values: dict[str, float], step: int) -> None:
        if self.kind != "tensorboard":
            self._package.log(values, step=step)
            return
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


def tracked_id(directory: Path) -> str:
    """The id of this run for a tracker that knows runs by one: drawn at the first start, and kept in the run's folder, which
    `--fresh` moves away."""
    path = directory / TRACKED
    known = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    if not known:  # also if a full disk or a kill left the file empty
        known = uuid.uuid4().hex[:12]
        with writing(path, None):
            path.write_text(f"{known}\n", encoding="utf-8")
    return known


def _source_values(prefix: str, sources: dict[str, SourceFigures] | None) -> dict[str, float]:
    """`prefix/figure/source` -> value."""
    return {
        f"{prefix}/{name}/{source}": value
        for source, figures in (sources or {}).items()
        for name, value in dataclasses.asdict(figures).items()
        if _is_plottable(value)
    }


def _is_plottable(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
