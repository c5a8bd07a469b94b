"""What commands print on."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

console = Console(highlight=False)
STYLES = {"+": "green", "-": "red", "@": "cyan"}


def print_diff(lines: Iterable[str], indent: str = "") -> None:
    """The lines of a unified diff, coloured."""
    for line in lines:
        console.print(indent + line, style=STYLES.get(line[:1]), markup=False, soft_wrap=True)
