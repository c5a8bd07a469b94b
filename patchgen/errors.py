"""The errors that patchgen shows its users. Each message says what was expected, what was found, where, and how to fix it."""

from __future__ import annotations

import ast


class PatchgenError(Exception):
    """Base of the errors that the command line prints without a traceback."""


class UpstreamNotFound(PatchgenError):
    """The upstream source is unavailable: unknown model, missing file, or a wheel that cannot be downloaded."""


class SourceSyntaxError(PatchgenError):
    """The upstream source does not parse; the message has file, line and column."""


class PassMismatch(PatchgenError):
    """A pass did not find the sites that it expects. Without this error the model would train unpatched.

    Attributes:
        sites: the sites that it missed, if it knows them.
        pass_name: the pass; the pipeline sets it.
    """

    def __init__(self, message: str, sites: tuple[str, ...] = (), pass_name: str = "") -> None:
        super().__init__(message)
        self.sites, self.pass_name = sites, pass_name


class EmissionError(PatchgenError):
    """The rewritten module is not a standalone file, for example because it refers to a name that was removed."""


class ConfigError(PatchgenError):
    """A model config asks for something that does not exist or contradicts itself."""


class Missed(Exception):
    """Code does not have the form that an analysis or a pass expects; a pass reports it as a `PassMismatch`."""

    def __init__(self, expected: str, found: ast.AST | str = "") -> None:
        super().__init__(expected)
        self.expected, self.found = expected, found if isinstance(found, str) else ast.unparse(found)


class LeftAlone(Exception):
    """Code that a pass recognises and does not rewrite: it is listed as a note. The text says why."""


class StaleFile(PatchgenError):
    """A committed generated file differs from what generation gives, or has manual edits that would be overwritten."""
