"""The base class of the doctor's checks, and the findings that they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        status: PASSED, FAILED or NOT_CHECKED.
        summary: the result with its numbers, or why nothing was checked.
        advice: how to fix a failure.
        details: further lines: samples with their labels, losses of changed models (the check `alternatives`).
    """

    status: str
    summary: str
    advice: str = ""
    details: str = ""

    def as_json(self) -> dict[str, str]:
        """The finding in the report of `--json`, which calls the summary `found` and the details `shown`."""
        return {"status": self.status, "found": self.summary, "advice": self.advice, "shown": self.details}


def passed(summary: str, details: str = "") -> Finding:
    return Finding(PASSED, summary, details=details)


def failed(summary: str, advice: str, details: str = "") -> Finding:
    return Finding(FAILED, summary, advice, details)


def not_checked(why: str) -> Finding:
    return Finding(NOT_CHECKED, why)


def first_names(names: Sequence[str], limit: int = 3) -> str:
    """The first names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def format_bytes(count: float) -> str:
    """A size in GiB or MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


class Check(ABC):
    """One check of a recipe with its checkpoint and data.

    Attributes:
        name: shown in the table, and accepted by `--skip`.
    """

    name: str

    @abstractmethod
    def run(self, patient: Patient) -> Finding:
        """Runs the check.

        Raises:
            MissingPart: a part is missing, or the check cannot run here; the finding becomes "not checked".
            RecipeError, DataError, CheckpointError: the finding becomes "failed", with this message.
        """
