"""The record of a run on disk: `steps.jsonl`, `recipe.yaml`, `report.txt`; and trackers where they are wanted.

{"step": 1, "loss": 8.31, "grad_norm": 2.4, "lr": 0.0001, "tokens": 8192, ...}
{"step": 20, "eval_loss": 5.02, "labels": 16210, "seconds": 1.2}
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import yaml

from patchgen.runtime.train.recipe import RecipeError
from patchgen.runtime.train.records import Evaluation, Listener, RunStart, StepRecord, Summary

STEPS, SUMMARY = "steps.jsonl", "summary.json"


class RunLog(Listener):
    """Writes the files; a continued run loses the lines of steps that are taken again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file: TextIO | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def on_start(self, start: RunStart) -> None:
        (self.directory / "recipe.yaml").write_text(yaml.safe_dump(start.recipe, sort_keys=False))
        (self.directory / "report.txt").write_text(start.report + "\n")
        path = self.directory / STEPS
        kept = [entry for entry in read(self.directory) if entry["step"] <= start.first_step]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        self._file = path.open("a", buffering=1)  # a line is on disk when it is written

    def on_step(self, record: StepRecord) -> None:
        self._write({name: value for name, value in dataclasses.asdict(record).items() if value is not None})

    def on_evaluation(self, evaluation: Evaluation) -> None:
        values = dataclasses.asdict(evaluation)
        self._write({"step": values["step"], "eval_loss": values["loss"], "labels": values["labels"]})

    def on_end(self, summary: Summary) -> None:
        (self.directory / SUMMARY).write_text(json.dumps(dataclasses.asdict(summary), indent=1) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")


def read(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run so far; a line that a crash cut off at the end is left out."""
    path = directory / STEPS
    if not path.is_file():
        return []
    lines = path.read_text().splitlines()
    entries = []
    for number, line in enumerate(lines):
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise
    return entries


def read_summary(directory: Path) -> dict[str, Any] | None:
    """How the run in this directory ended, as `records.Summary` has it; None while it has not."""
    path = directory / SUMMARY
    return json.loads(path.read_text()) if path.is_file() else None


def require_tracker(kind: str) -> ModuleType:
    """The package of a tracker.

    Raises:
        RecipeError: it is not installed.
    """
    packages = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
    try:
        return importlib.import_module(packages[kind])
    except ImportError as error:
        raise RecipeError(
            f"log.trackers names '{kind}', which is not installed ({error}). `pip install {kind}`, or remove it."
        ) from error


class Tracker(Listener):
    """Hands the numbers of each step to TensorBoard, wandb or trackio."""

    def __init__(self, kind: str, project: str, directory: Path) -> None:
        self.kind, self.project, self.directory = kind, project, directory
        self._package = require_tracker(kind)
        self._is_open = False

    def on_start(self, start: RunStart) -> None:
        if self.kind == "tensorboard":
            self._writer = self._package.SummaryWriter(self.directory / "tensorboard", purge_step=start.first_step + 1)
        else:
            self._package.init(project=self.project, name=start.name, config=start.recipe)
        self._is_open = True

    def on_step(self, record: StepRecord) -> None:
        values = {f"train/{name}": value for name, value in dataclasses.asdict(record).items() if _is_plottable(value)}
        self._write(values, record.step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._write({"eval/loss": evaluation.loss}, evaluation.step)

    def close(self) -> None:
        if self._is_open:  # after errors, too: what was handed over is kept
            self._writer.close() if self.kind == "tensorboard" else self._package.finish()

    def _write(self, values: dict[str, float], step: int) -> None:
        if self.kind != "tensorboard":
            self._package.log(values, step=step)
            return
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


def _is_plottable(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
