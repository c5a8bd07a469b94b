"""What was observed in a step of a generated file, and the layouts that it leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import FactRecord

VALUE, LENGTH, STATE = "value", "length", "state"
ONE_RANK, WHOLE_SEQUENCES = "one rank", "whole sequences"
ALLOWS = {VALUE: ONE_RANK, STATE: ONE_RANK, LENGTH: WHOLE_SEQUENCES}
"""Kind of a fact with an effect -> the layouts that it allows."""
UNKNOWN = "nothing says what it does"
"""The effect of what could not be observed: it allows no more than the worst that could have been found."""


@dataclass(frozen=True)
class Fact:
    """One thing that a step does.

    Attributes:
        kind: a value read by Python, a number computed from a length, or a value kept for the next step; also of a step that
            could not be observed in this respect.
        line, code: of the generated file; 0 where no line of it does it.
        what: is read, computed or kept.
        effect: what other data, a shorter slice or an earlier step change; empty if nothing: the fact is only reported.
    """

    kind: str
    line: int
    code: str
    what: str
    effect: str = ""

    @property
    def sentence(self) -> str:
        """The fact as a sentence."""
        place = f"line {self.line}, `{self.code}`: " if self.line else ""
        return f"{place}{self.what}{f': {self.effect}' if self.effect else ''}."


def reason_against(facts: Iterable[Fact], *, ranks: int, sp: int) -> str:
    """Why a model may not run on this many ranks, of which `sp` share a sequence, in a sentence; empty if it may."""
    for fact in facts:
        allowed = ALLOWS.get(fact.kind) if fact.effect else None
        if allowed == ONE_RANK and ranks > 1:
            return f"{fact.sentence} So it trains on one rank, not on {ranks}."
        if allowed == WHOLE_SEQUENCES and sp > 1:
            return f"{fact.sentence} A slice is shorter than its sequence, so it trains with sp=1, not with sp={sp}."
    return ""


def to_records(facts: Iterable[Fact]) -> list[FactRecord]:
    """The facts as `verify.json` has them."""
    return [
        {"kind": fact.kind, "line": fact.line, "code": fact.code, "what": fact.what, "effect": fact.effect}
        for fact in facts
    ]


def from_records(records: Iterable[FactRecord]) -> tuple[Fact, ...]:
    """The facts of a record."""
    return tuple(Fact(**record) for record in records)
