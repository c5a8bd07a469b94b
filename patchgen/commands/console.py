"""The console that commands print to."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Generator, Iterable
from pathlib import Path

from rich.console import Console

from patchgen.errors import PatchgenError

console = Console(highlight=False)
DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def text_diff(before: str, after: str) -> str:
    """A plain unified diff of two texts."""
    left, right = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(left, right, "before", "after"))


def print_diff(lines: Iterable[str], indent: str = "", target: Console = console) -> None:
    """Prints the lines of a unified diff in colour, each after `indent`."""
    for line in lines:
        target.print(indent + line, style=DIFF_STYLES.get(line[:1]), markup=False, soft_wrap=True)


@contextlib.contextmanager
def refusing_unwritable(path: Path, named_by: str = "--output") -> Generator[None, None, None]:
    """Turns an `OSError` while an output is written into a refusal with its path.

    Args:
        named_by: the option or argument that names the output.

    Raises:
        PatchgenError: the output cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise PatchgenError(
            f"{path} cannot be written: {error}. To fix: name another place with {named_by}."
        ) from error


def display_path(path: Path) -> str:
    """The path with links resolved: relative to the working directory if it is inside, else absolute."""
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(resolved)
