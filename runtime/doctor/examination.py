"""Runs all checks, and formats the table of their findings."""

from __future__ import annotations

import contextlib
import difflib
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.data import DataError
from patchgen.runtime.doctor.chat_template import ChatTemplate
from patchgen.runtime.doctor.computation import Kernels, Packing, Router
from patchgen.runtime.doctor.finding import FAILED, NOT_CHECKED, PASSED, Check, Finding, failed, not_checked, passed
from patchgen.runtime.doctor.labels import Data, Labels
from patchgen.runtime.doctor.losses import Alternatives, FirstLoss
from patchgen.runtime.doctor.objective_data import ObjectiveCheck
from patchgen.runtime.doctor.patient import MissingPart, Patient
from patchgen.runtime.doctor.plain_transformers import Export, PlainTransformers
from patchgen.runtime.doctor.step_checks import Layout, Step
from patchgen.runtime.doctor.tokens import Padding, Tokenizer
from patchgen.runtime.doctor.weights import TrainedParameters, Weights
from patchgen.runtime.parallel.gradients import NonFiniteGradient
from patchgen.runtime.train import data_check, preflight, run_plan
from patchgen.runtime.train.recipe import Recipe, RecipeError
from patchgen.runtime.train.records import TrainingStopped
from patchgen.runtime.verify.verdict import one_line


class RecipeIsValid(Check):
    """Nothing in the recipe that `patchgen train` would refuse before any rank starts."""

    name = "recipe"

    def run(self, patient: Patient) -> Finding:
        run_plan.require_valid_on_some_ranks(patient.recipe)
        config = patient.config
        data_check.require_data(patient.recipe)
        _ = patient.blueprint
        return passed(
            f"{type(config).__name__} of {patient.recipe.model.source}; weights: {patient.checkpoint or 'random'}."
        )


class Proof(Check):
    """The proof that `patchgen train` requires, on a small form of the model."""

    name = "proof"

    def run(self, patient: Patient) -> Finding:
        patient.recipe, patient.proof_has_run = preflight.decide_trainable(patient.recipe), True
        rows = ", each document in a row of its own" if patient.recipe.model.separate_documents else ""
        attention = patient.recipe.model.attention
        return passed(f"A small form of the model trains as upstream's, with attention '{attention}'{rows}.")


CHECKS: tuple[type[Check], ...] = (
    RecipeIsValid,
    Proof,
    Tokenizer,
    Data,
    Padding,
    ChatTemplate,
    Labels,
    Weights,
    TrainedParameters,
    FirstLoss,
    ObjectiveCheck,
    Alternatives,
    Packing,
    Kernels,
    Router,
    Export,  # from here on other models need the memory
    PlainTransformers,
    Step,
    Layout,
)
"""In the order in which they run: those that need least come first."""
STATUS_LABELS = {PASSED: "passed", FAILED: "FAILED", NOT_CHECKED: "-"}
WIDTH = 120


@dataclass(frozen=True)
class Entry:
    """What one check found, and how long it took."""

    check: str
    seconds: float
    finding: Finding


@dataclass
class Report:
    """The findings of all checks, in their order."""

    recipe: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the checks that failed."""
        return tuple(entry.check for entry in self.entries if entry.finding.status == FAILED)

    @property
    def exit_status(self) -> int:
        return 1 if self.failed else 0

    def __getitem__(self, name: str) -> Finding:
        return next(entry.finding for entry in self.entries if entry.check == name)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        checks = [
            {"check": entry.check, "seconds": round(entry.seconds, 2), **entry.finding.as_json()}
            for entry in self.entries
        ]
        return {"recipe": self.recipe, "failed": list(self.failed), "checks": checks}

    def text(self) -> str:
        """The table with a row per check, then the details."""
        return "\n".join([*map(format_entry, self.entries), self.details()])

    def details(self) -> str:
        """The text below the table: samples and figures, and how many checks passed."""
        lines = []
        for entry in self.entries:
            if entry.finding.details:
                lines += ["", f"{entry.check}:", textwrap.indent(entry.finding.details, "  ")]
        counts = {status: sum(entry.finding.status == status for entry in self.entries) for status in STATUS_LABELS}
        lines += ["", ", ".join(f"{count} {status}" for status, count in counts.items()) + "."]
        return "\n".join(lines)


def format_entry(entry: Entry) -> str:
    """A row of the table, with its advice, if it has any."""
    width, finding = max(len(check.name) for check in CHECKS), entry.finding
    text = f"not checked: {finding.summary}" if finding.status == NOT_CHECKED else finding.summary
    lines = [*_wrapped(f"{entry.check:<{width}}  {STATUS_LABELS[finding.status]:<6}  ", text)]
    if finding.advice:
        lines += _wrapped(" " * (width + 2) + "to fix  ", finding.advice)
    return "\n".join(lines)


def examine(
    recipe: Recipe,
    *,
    skip: Collection[str] = (),
    memory: int | None = None,
    on_entry: Callable[[Entry], None] = lambda entry: None,
) -> Report:
    """Runs every check on a recipe.

    Args:
        skip: names of checks that do not run.
        memory: the most bytes that a model may take; a larger model is loaded layer by layer. None: nine tenths of the
            free memory.
        on_entry: called with each entry as soon as its check has run.

    Raises:
        RecipeError: a name in `skip` is not that of a check.
    """
    require_names(skip)
    patient, report = Patient(recipe, memory=memory), Report(recipe.name)
    try:
        for check in CHECKS:
            started = time.perf_counter()
            finding = not_checked("it was skipped (--skip).") if check.name in skip else _run_check(check(), patient)
            report.entries.append(Entry(check.name, time.perf_counter() - started, finding))
            on_entry(report.entries[-1])
    finally:
        patient.close()
    return report


def _run_check(check: Check, patient: Patient) -> Finding:
    """The finding of a check; errors become findings."""
    patient.current_check = check.name
    try:
        # What checks print must not get into the table or its JSON.
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            return check.run(patient)
    except MissingPart as reason:
        return not_checked(str(reason))
    except (RecipeError, DataError, CheckpointError) as error:
        return failed(str(error), "Fix what this error names: `patchgen train` would refuse it, too.")
    except (TrainingStopped, NonFiniteGradient) as error:
        return failed(
            str(error),
            "`patchgen train` would stop there, too: look at the samples of this step, at the weights and the optimizer.",
        )
    except Exception as error:  # the other checks still run
        return failed(
            one_line(f"{type(error).__name__}: {error}"),
            "This is not a refusal but an unexpected error: in the modeling file, in the code of the data, or in the doctor.",
        )


def require_names(names: Collection[str]) -> None:
    """Raises RecipeError for a name that no check has, with the closest one."""
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise RecipeError(
                f"There is no check '{name}'.{f' Closest: {near[0]}.' if near else ''} Checks: {', '.join(known)}."
            )


def _wrapped(start: str, text: str) -> Iterator[str]:
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, WIDTH - len(start)) or [""]]
    yield start + (lines[0] if lines else "")
    yield from (" " * len(start) + line for line in lines[1:])
