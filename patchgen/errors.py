"""The errors that patchgen shows its users. Each message says what was expected, what was found, where, and what to do."""

from __future__ import annotations

import ast


class PatchgenError(Exception):
    """Base of the errors that the command line prints without a traceback."""


class UpstreamNotFound(PatchgenError):
    """The upstream source is unavailable: unknown model, missing file, wheel out of reach."""


class SourceSyntaxError(PatchgenError):
    """The upstream source does not parse; the message has file, line and column."""


class PassMismatch(PatchgenError):
    """A pass did not hit what it declared. Without this error the model would train on, unpatched.

    Attributes:
        sites: the places that it missed, where it knows them.
        pass_name: the pass, once the pipeline has seen the error.
    """

    def __init__(self, message: str, sites: tuple[str, ...] = (), pass_name: str = "") -> None:
        super().__init__(message)
        self.sites, self.pass_name = sites, pass_name


class EmissionError(PatchgenError):
    """The rewritten module is not a standalone file, for example because it refers to a name that is gone."""


class ConfigError(PatchgenError):
    """A model config asks for something that does not exist or contradicts itself."""


class Missed(Exception):
    """Code has another form than the one that its reader, or a pass, knows; a pass makes a `PassMismatch` of it."""

    def __init__(self, expected: str, found: ast.AST | str = "") -> None:
        super().__init__(expected)
        self.expected, self.found = expected, found if isinstance(found, str) else ast.unparse(found)


class LeftAlone(Exception):
    """Code that a pass knows and does not serve: it is listed as a note. The text says why."""


class StaleFile(PatchgenError):
    """A committed generated file differs from what generation gives, or has edits that would be lost."""
