"""What a check of the doctor finds, and what a check is."""

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
        found: what was seen, with its figures; of what was not checked, why.
        advice: what to do about a failure.
        shown: lines for the reader to look at: samples with their labels, figures by layer.
    """

    status: str
    found: str
    advice: str = ""
    shown: str = ""


def passed(found: str, shown: str = "") -> Finding:
    """It is as it should be."""
    return Finding(PASSED, found, shown=shown)


def failed(found: str, advice: str, shown: str = "") -> Finding:
    """It is not, and this is what to do."""
    return Finding(FAILED, found, advice, shown)


def not_checked(why: str) -> Finding:
    """Nothing is known."""
    return Finding(NOT_CHECKED, why)


def few(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def told_size(count: float) -> str:
    """Bytes in a unit that shows them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


class Check(ABC):
    """One question, asked of a recipe with its checkpoint and data.

    Attributes:
        name: as the table and `--skip` call it.
    """

    name: str

    @abstractmethod
    def run(self, patient: Patient) -> Finding:
        """The answer.

        Raises:
            Needs: a part of the patient is not to be had, which another check tells of.
            RecipeError, DataError, CheckpointError: in the words of what refuses; the check has failed with them.
        """
