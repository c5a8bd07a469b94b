"""How far a proof reaches, as every record, page and refusal states it.

proven                       equal to upstream, eager and on the training path
proven, eager only: REASON   equal to upstream with eager attention in one process; a run differs, fails or was not compared
generated: REASON            there is generated code, and it is not equal to upstream or was not compared
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchgen.runtime.verify.proof import Proof

PROVEN = "proven"
EAGER_ONLY = "proven, eager only"
GENERATED = "generated"
MAX_LENGTH = 320
"""Characters of a reason: messages of other libraries may be pages long."""


@dataclass(frozen=True)
class Verdict:
    """A status, and why it is not "proven"; empty if it is."""

    status: str
    reason: str = ""

    @property
    def words(self) -> str:
        """The status and its reason."""
        return f"{self.status}: {self.reason}" if self.reason else self.status


def of(proof: Proof) -> Verdict:
    """The verdict on a merged proof of all variants."""
    if proof.failures:
        return Verdict(GENERATED, one_line(proof.failures[0]))
    if not proof.cases:
        return Verdict(GENERATED, "no case ran.")
    if proof.not_compared:
        missing = "; ".join(f"{kind} was not compared: {reason}" for kind, reason in proof.not_compared.items())
        return Verdict(GENERATED, one_line(missing))
    if proof.training is None:
        return Verdict(EAGER_ONLY, "the training path was not compared.")
    if proof.training.reason:
        return Verdict(EAGER_ONLY, one_line(proof.training.reason))
    return Verdict(PROVEN)


def one_line(text: object) -> str:
    """A message in one line of at most `MAX_LENGTH` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= MAX_LENGTH else line[: MAX_LENGTH - 3].rstrip() + "..."


def one_line_error(error: Exception) -> str:
    """An exception in one line, ending in a full stop."""
    text = " ".join(str(error).split()) or "no message"
    message = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return message if message.endswith((".", "!", "?")) else f"{message}."
