"""How long a run takes to start: from the command to the end of its second step, by what was done.

    start     13.4 s to the end of step 2: command 3.2, imports 3.9, ranks meet 0.6, data 0.2, model 0.9, weights 2.0, ...

The parts are those of rank 0, one after the other: `mark(name)` ends one. Compiled kernels are kept for the next start.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

STARTED, LAUNCHED = "PATCHGEN_COMMAND_STARTED", "PATCHGEN_RANKS_LAUNCHED"
"""Environment variables of ranks: when their command started, and when it started them, in seconds since the epoch."""
SHOWN = 0.05  # seconds: shorter parts are not shown

_marks: list[tuple[str, float]] = []


def process_started() -> float:
    """When this process started, in seconds since the epoch; now, where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()


def begin() -> None:
    """Called in a rank as soon as it has what it imports: forgets marks of an earlier run of this process."""
    begun = process_started()
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first and LAUNCHED in os.environ:
        _marks[:] = [("", float(os.environ[STARTED])), ("command", float(os.environ[LAUNCHED])), ("launch", begun)]
    else:  # started again, by another agent, or in the process of the command itself
        _marks[:] = [("", begun)]
    mark("imports" if len(_marks) > 1 else "command")


def mark(name: str) -> None:
    """Ends a part."""
    if _marks:
        _marks.append((name, time.time()))


def summary(until: str) -> str:
    """A line for the parts so far; "" if nothing began. Later marks are ignored."""
    if not _marks:
        return ""
    parts: dict[str, float] = {}
    for (_, before), (name, after) in itertools.pairwise(_marks):
        parts[name] = parts.get(name, 0.0) + after - before
    shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= SHOWN)
    total = _marks[-1][1] - _marks[0][1]
    _marks.clear()
    return f"start     {total:.1f} s to the end of {until}: {shown}"
