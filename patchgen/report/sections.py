"""Aligned lines as HTML, in sections that a browser lays out when they come into view, with the sites that passes changed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest

from markupsafe import Markup, escape

from patchgen.report.highlight import highlighted, struck
from patchgen.report.lines import FINISH, Row

PRUNE = "prune"
PLUMBING = (PRUNE, "absolute_imports", FINISH)
"""Steps that change every file: shown, but not as sites to jump to."""
SECTION_ROWS = 48
"""The most rows of a section of unchanged or dropped lines."""
Cell = tuple[int, str]
"""A line's number (0: no line) and the pass that changed it (empty: none)."""


@dataclass
class Site:
    """Adjacent lines that passes changed, and the class or function that they are in."""

    key: str  # its anchor in the page
    symbol: str
    line: int  # in the generated file, or else in upstream's
    passes: list[str]


@dataclass
class Code:
    """The two files as HTML.

    Attributes:
        anchors: `Class.method` -> the anchor of the first line of its definition, in the generated file or else in upstream's.
    """

    html: Markup
    sites: list[Site] = field(default_factory=list[Site])
    anchors: dict[str, str] = field(default_factory=dict[str, str])


def symbols(text: str) -> list[tuple[int, int, str]]:
    """First line, last line and name of each class, method and function, outer ones first; those inside functions are left out."""
    found: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{owner}{child.name}"
                start = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found.append((start, child.end_lineno or child.lineno, name))
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{name}.")

    visit(ast.parse(text), "")
    return found


def side_by_side(rows: Sequence[Row], left: str, right: str, hues: Mapping[str, int]) -> Code:
    """The page's code.

    Args:
        rows: as `lines.trace` gives them.
        left: the text of upstream's file.
        right: the generated text.
        hues: pass -> its hue.
    """
    writer = _SectionWriter(highlighted(left), highlighted(right), symbols(left), symbols(right), hues)
    parts: list[str] = []
    for kind, group in groupby(rows, key=_kind):
        write = {"same": writer.same, "dropped": writer.dropped, "changed": writer.changed}[kind]
        parts += write(list(group))
    return Code(Markup("".join(parts)), writer.sites, writer.anchors())


def _kind(row: Row) -> str:
    if row.by == PRUNE and not row.right:
        return "dropped"
    return "changed" if row.by else "same"


class _SectionWriter:
    """Writes sections, and collects the sites that can be jumped to."""

    def __init__(
        self,
        left: list[str],
        right: list[str],
        left_symbols: list[tuple[int, int, str]],
        right_symbols: list[tuple[int, int, str]],
        hues: Mapping[str, int],
    ) -> None:
        self._left, self._right, self._hues = left, right, hues
        self._left_symbols, self._right_symbols = left_symbols, right_symbols
        self._left_starts, self._right_starts = (
            {start for start, _, _ in symbols_of_side} for symbols_of_side in (left_symbols, right_symbols)
        )
        self.sites: list[Site] = []

    def anchors(self) -> dict[str, str]:
        upstream = {name: f"L{start}" for start, _, name in self._left_symbols}
        return upstream | {name: f"R{start}" for start, _, name in self._right_symbols}

    def same(self, rows: list[Row]) -> Iterator[str]:
        cells = [((row.left, ""), (row.right, "")) for row in rows]
        for start in range(0, len(cells), SECTION_ROWS):
            yield self._section(cells[start : start + SECTION_ROWS])

    def dropped(self, rows: list[Row]) -> Iterator[str]:
        lines = [(row.left, "") for row in rows]
        names = [
            name for start, _, name in self._left_symbols if lines[0][0] <= start <= lines[-1][0] and "." not in name
        ]
        title = ", ".join(names) or "upstream's lines"
        body = "".join(
            self._section([(line, (0, "")) for line in lines[start : start + SECTION_ROWS]])
            for start in range(0, len(lines), SECTION_ROWS)
        )
        yield f'<details class="gone"><summary>{escape(title)}: {len(lines)} lines dropped, not reached</summary>{body}</details>'

    def changed(self, rows: list[Row]) -> Iterator[str]:
        cells = list(
            zip_longest(
                [(row.left, row.by) for row in rows if row.left],
                [(row.right, row.by) for row in rows if row.right],
                fillvalue=(0, ""),
            )
        )
        passes = [name for name in dict.fromkeys(row.by for row in rows) if name not in PLUMBING]
        if not passes:
            yield self._section(cells)
            return
        key = f"s{len(self.sites)}"
        line, file_symbols = next(
            ((row.right, self._right_symbols) for row in rows if row.right), (rows[0].left, self._left_symbols)
        )
        symbol = next((name for start, end, name in reversed(file_symbols) if start <= line <= end), "the file")
        self.sites.append(Site(key, symbol, line, passes))
        title = escape(f"{', '.join(passes)}: {symbol}")
        hue = self._hues.get(passes[0], 0)
        yield f'<div class="site" id="{key}" data-site="{title}" style="--h:{hue}">{self._section(cells)}</div>'

    def _section(self, cells: list[tuple[Cell, Cell]]) -> str:
        rows = "".join(self._row(left, right) for left, right in cells)
        return f'<section style="--n:{len(cells)}">{rows}</section>'

    def _row(self, left: Cell, right: Cell) -> str:
        anchor = ""
        if right[0] in self._right_starts:
            anchor = f' id="R{right[0]}"'
        elif left[0] in self._left_starts and not right[0]:
            anchor = f' id="L{left[0]}"'
        changed = " x" if left[1] or right[1] else "" if right[0] else " o"
        old, new = self._cell(left, self._left, "l"), self._cell(right, self._right, "g")
        return f'<div class="r{changed}"{anchor}>{old}{new}</div>'

    def _cell(self, cell: Cell, lines: list[str], side: str) -> str:
        number, by = cell
        if not number:
            return f'<b></b><pre class="{side} e"></pre>'
        if not by:
            return f'<b>{number}</b><pre class="{side}">{lines[number - 1]}</pre>'
        shown = struck(lines[number - 1]) if side == "l" else lines[number - 1]
        hue, plain = self._hues.get(by, 0), " q" if by in PLUMBING else ""
        return f'<b>{number}</b><pre class="{side} w{plain}" style="--h:{hue}" title="{escape(by)}">{shown}</pre>'
