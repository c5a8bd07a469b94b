"""How far a proof reaches, as every record, page and refusal states it.

proven                       equal to upstream, eager and on the training path, in one process and on two ranks
proven, one rank only: ...   in one process alone; with FSDP on two ranks it differs, hangs or is refused
proven, without ep: REASON   not where ranks share the experts: it differs there, or hangs
proven, without sp: REASON   not where ranks share a sequence
proven, eager only: REASON   equal to upstream with eager attention in one process; a run differs, fails or was not compared
generated: REASON            there is generated code, and it is not equal to upstream or was not compared

A layout that a run refuses at its start, because experts or a sequence cannot be shared, leaves a model proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchgen.runtime.verify.proof import Proof

PROVEN = "proven"
EAGER_ONLY = "proven, eager only"
GENERATED = "generated"
ONE_RANK = "proven, one rank only"
WITHOUT = {"fsdp2": ONE_RANK, "ep2": "proven, without ep", "sp2": "proven, without sp"}
"""Layout of two ranks (`layout.TWO_RANKS`) -> the status of a model that does not agree in it."""
IN_WORDS = {
    "fsdp2": "FSDP on two ranks",
    "ep2": "experts shared by two ranks",
    "sp2": "a sequence shared by two ranks",
}
PROVEN_IN_ONE_PROCESS = (PROVEN, *WITHOUT.values())
"""The statuses of a file that is proven in one process, whatever it does on two ranks."""
REFUSED = "refused"
"""How the reason of a layout begins that a run refuses at its start."""
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
    return on_two_ranks({name: found.reason for name, found in (proof.two_ranks or {}).items()})


def on_two_ranks(reasons: Mapping[str, str]) -> Verdict:
    """The verdict on a model that is proven in one process.

    Args:
        reasons: layout -> why it does not agree there, "" if it does.
    """
    for layout, status in WITHOUT.items():
        reason = reasons.get(layout, "")
        if reason and (layout == "fsdp2" or not reason.startswith(REFUSED)):
            return Verdict(status, one_line(f"{IN_WORDS[layout]}: {reason}"))
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
