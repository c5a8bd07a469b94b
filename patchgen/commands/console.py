"""The console that commands print to."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from pathlib import Path

from rich.console import Console

from patchgen.errors import PatchgenError

console = Console(highlight=False)
STYLES = {"+": "green", "-": "red", "@": "cyan"}


def print_diff(lines: Iterable[str], indent: str = "", to: Console = console) -> None:
    """Prints the lines of a unified diff in colour."""
    for line in lines:
        to.print(indent + line, style=STYLES.get(line[:1]), markup=False, soft_wrap=True)


@contextlib.contextmanager
def writing(path: Path) -> Generator[None, None, None]:
    """Reports an output that cannot be written as a user's mistake, with its path."""
    try:
        yield
    except OSError as error:
        raise PatchgenError(
            f"{path} cannot be written: {error}. To fix: name another place for the output."
        ) from error


def display_path(path: Path) -> str:
    """The path relative to the working directory, if it is inside, with links resolved."""
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(resolved)
