"""Commands as a user types them, run in the process of a test."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from patchgen.cli import app


def invoke(*arguments: str) -> Result:
    """Runs a command; an error for the user is raised."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
