"""What goes wrong with checkpoints. Messages name file and key, and list every problem, not the first."""

from __future__ import annotations

from collections.abc import Sequence

NUM_LISTED = 20
"""How many of several like problems a message lists; the others are counted."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written as asked: nothing was changed on disk by the failed call.

    Attributes:
        problems: every problem that was found, one sentence each.
    """

    def __init__(self, what: str, problems: Sequence[str] = (), *, advice: str = "") -> None:
        self.problems = tuple(problems)
        lines = [what, *(f"  {problem}" for problem in self.problems[:NUM_LISTED])]
        if len(self.problems) > NUM_LISTED:
            lines.append(f"  ... and {len(self.problems) - NUM_LISTED} more (all are in `.problems`)")
        super().__init__("\n".join([*lines, *([advice] if advice else [])]))

    def __reduce__(self):
        return _rebuild, (type(self), str(self), self.problems)


def _rebuild(kind: type[CheckpointError], text: str, problems: tuple[str, ...]) -> CheckpointError:
    """An equal error on another rank, or in the process that waits for this one."""
    error = kind(text)
    error.problems = problems
    return error
