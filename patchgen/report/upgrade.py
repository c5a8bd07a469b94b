"""A move to another release, a page per model: old upstream, new upstream and what is generated then, site by site."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from patchgen.report.highlight import highlighted, struck
from patchgen.report.lines import lines_of, opcodes
from patchgen.templates import render
from patchgen.upgrade.findings import SAME, WORDS, ModelUpgrade, Site, Upgrade

Aligned = tuple[int | None, int | None, int | None]
"""A line of each of three texts, from 0; None where a text has none there."""


@dataclass(frozen=True)
class Block:
    """A site as the page shows it.

    Attributes:
        columns: what each is; the third is what is generated then, or the edit that stands in its way, if there is either.
    """

    key: str
    site: Site
    columns: tuple[str, ...]
    html: Markup


CONTEXT = 6
"""Lines that are shown around what moved; longer stretches where nothing did are left out."""


def index(found: Upgrade) -> str:
    """The page over all models of what `upgrade.compare` found."""
    counts = {word: sum(one.verdict == verdict for one in found.models) for verdict, word in WORDS.items()}
    return render("report_upgrade_index.jinja", found=found, words=WORDS, counts=counts, same=SAME)


def page(model: ModelUpgrade) -> str:
    """The page of one model."""
    blocks = [_block(f"s{number}", site, model) for number, site in enumerate(model.sites)]
    return render("report_upgrade.jinja", model=model, blocks=blocks, words=WORDS, same=SAME)


def _block(key: str, site: Site, model: ModelUpgrade) -> Block:
    third, text = ("the edit", site.edit) if site.edit else ("generated then", site.generated_then)
    columns = (f"upstream {model.old}", f"upstream {model.new}", third)
    texts = [textwrap.dedent(one) for one in (site.old_upstream, site.new_upstream, text)]
    return Block(key, site, columns if text else columns[:2], _table(texts, (site.old_line, site.new_line, 1)))


def align(old: Sequence[str], new: Sequence[str], then: Sequence[str]) -> list[Aligned]:
    """The lines of three texts in rows: what the new one shares with either other, or what stands in its place, is beside it.

    Further lines of the outer texts stand in rows without the new one, above its next line.
    """
    before, after = _partners(old, new), _partners(then, new)
    rows: list[Aligned] = []
    i = k = 0
    for line in range(len(new) + 1):
        left = before.get(line) if line < len(new) else len(old)
        right = after.get(line) if line < len(new) else len(then)
        own_left = range(i, left) if left is not None else range(0)
        own_right = range(k, right) if right is not None else range(0)
        for number in range(max(len(own_left), len(own_right))):
            rows.append(
                (
                    own_left[number] if number < len(own_left) else None,
                    None,
                    own_right[number] if number < len(own_right) else None,
                )
            )
        i, k = left if left is not None else i, right if right is not None else k
        if line < len(new):
            rows.append((left, line, right))
            i, k = i + (left is not None), k + (right is not None)
    return rows


def _partners(other: Sequence[str], new: Sequence[str]) -> dict[int, int]:
    """Line of the new text -> the line of the other that it is, or that it replaces."""
    found = {}
    for _, left, right in opcodes(other, new):
        found.update(zip(range(right.start, right.stop), range(left.start, left.stop), strict=False))
    return found


def _table(texts: Sequence[str], firsts: Sequence[int]) -> Markup:
    """The rows of three texts, or of two where the third is empty."""
    columns = 3 if texts[2] else 2
    plain, html = [lines_of(text) for text in texts], [highlighted(text) for text in texts]
    rows = []
    for marks, aligned, skipped in _in_view(align(*plain), plain, columns):
        if skipped:
            rows.append(f'<div class="skip">{skipped} lines are the same</div>')
            continue
        cells = []
        for column, line in enumerate(aligned[:columns]):
            if line is None:
                cells.append('<b></b><pre class="e"></pre>')
                continue
            shown = f' class="w{" l" if column == 0 else ""}" style="--h:{HUES[column]}"' if marks[column] else ""
            text = struck(html[column][line]) if marks[column] and column == 0 else html[column][line]
            cells.append(f"<b>{line + firsts[column]}</b><pre{shown}>{text}</pre>")
        rows.append(f'<div class="r{" x" if any(marks) else ""}">{"".join(cells)}</div>')
    return Markup(f'<section style="--n:{len(rows)}">{"".join(rows)}</section>')


HUES = (4, 140, 215)
"""Colours: what the new release dropped, what it added, what passes wrote."""


def _in_view(
    rows: Sequence[Aligned], texts: Sequence[Sequence[str]], columns: int
) -> Iterator[tuple[list[bool], Aligned, int]]:
    """The rows near one where a text differs: in which columns, the row, and how many are left out in its place."""
    marks = [_marks(row, texts)[:columns] for row in rows]
    moved = [number for number, found in enumerate(marks) if any(found)]
    seen = {near for number in moved for near in range(number - CONTEXT, number + CONTEXT + 1)}
    for is_seen, group in groupby(range(len(rows)), key=seen.__contains__):
        numbers = list(group)
        if is_seen or len(numbers) < CONTEXT:
            yield from ((marks[number], rows[number], 0) for number in numbers)
        else:
            yield marks[numbers[0]], rows[numbers[0]], len(numbers)


def _marks(row: Aligned, texts: Sequence[Sequence[str]]) -> list[bool]:
    """Whether the old line is not the new one, the new one not the old, and what is generated not the new one."""
    old, new, then = (None if line is None else text[line] for line, text in zip(row, texts, strict=True))
    return [old != new, old != new, then != new]
