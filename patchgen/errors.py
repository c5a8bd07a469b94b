"""The errors of the generator: those that the command line prints, and `Missed` and `LeftAlone`, which passes handle.

A message says what was expected, what was found, where, and how to fix it.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable


def nearest(wrong: Iterable[str], known: Iterable[str], n: int = 3, cutoff: float = 0.2, between: str = ", ") -> str:
    """The known names that are most like wrong ones, for a message: up to `n` for each."""
    names = [*known]
    return between.join(near for one in wrong for near in difflib.get_close_matches(one, names, n, cutoff)) or "none"


class PatchgenError(Exception):
    """Base of the errors that the command line prints without a traceback."""


class UpstreamNotFound(PatchgenError):
    """Something named does not exist: a model, a file, a release, a wheel, or an environment with a release."""


class SourceSyntaxError(PatchgenError):
    """The upstream source cannot be read as Python; the message has the file, and the place where it is known."""


class PassMismatch(PatchgenError):
    """A pass did not find what it expects, or another number of it. Without this error the model would train unpatched.

    Attributes:
        sites: the sites that the pass missed; if their number is wrong, those that it hit; empty if none are known.
        pass_name: set by the pipeline.
    """

    def __init__(self, message: str, sites: tuple[str, ...] = (), pass_name: str = "") -> None:
        super().__init__(message)
        self.sites, self.pass_name = sites, pass_name


class EmissionError(PatchgenError):
    """The rewritten module is not a standalone file, for example because it refers to a name that was removed."""


class ConfigError(PatchgenError):
    """A config, an option, a recipe or a project asks for what does not exist or contradicts itself; or a package is missing."""


class Missed(Exception):
    """Code does not have the form, given in words or as source, that an analysis or a pass expects; becomes a `PassMismatch`
    that shows the closest code, `found`."""

    def __init__(self, expected: str, found: ast.AST | str = "") -> None:
        super().__init__(expected)
        self.expected, self.found = expected, found if isinstance(found, str) else ast.unparse(found)

    def __str__(self) -> str:
        lines = self.found.strip().splitlines()
        return f"expected {self.expected}" + (f", found {lines[0][:120]}" if lines else "")


class LeftAlone(Exception):
    """A pass recognises code and leaves it unchanged; the message says why and becomes a note."""


class StaleFile(PatchgenError):
    """A generated file has manual edits, its record is missing or unreadable, or the target of a hand edit has changed."""
