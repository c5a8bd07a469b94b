"""The error of this package. Messages name file and key, and list all problems, not only the first."""

from __future__ import annotations

from collections.abc import Sequence

NUM_LISTED = 20
"""The most problems that a message lists; the others are counted."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; nothing on disk was changed, unless the message says otherwise.

    Attributes:
        problems: all problems, one sentence each.
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
    """An equal error in another process."""
    error = kind(text)
    error.problems = problems
    return error
