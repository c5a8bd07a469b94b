"""A move to another release, one page per model: old upstream, new upstream and the newly generated code, site by site."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from markupsafe import Markup

from patchgen.report.highlight import highlighted, struck
from patchgen.report.lines import diff_blocks, lines_of
from patchgen.templates import render
from patchgen.upgrade.findings import SAME, VERDICT_NAMES, ModelUpgrade, Site, Upgrade

Aligned = tuple[int | None, int | None, int | None]
"""A line number of each of three texts, from 0; None if a text has no line there."""


@dataclass(frozen=True)
class Block:
    """A site as the page shows it.

    Attributes:
        columns: their titles; the third, if any, is the newly generated code or, for a hand edit, the code of the edit.
    """

    key: str
    site: Site
    columns: tuple[str, ...]
    html: Markup


CONTEXT = 6
"""Unchanged lines that are shown around a change; longer stretches of unchanged lines are left out."""


def index(found: Upgrade) -> str:
    """The page over all models that `upgrade.compare` compared."""
    counts = {name: sum(model.verdict == verdict for model in found.models) for verdict, name in VERDICT_NAMES.items()}
    return render("report_upgrade_index.jinja", found=found, verdict_names=VERDICT_NAMES, counts=counts, same=SAME)


def page(model: ModelUpgrade) -> str:
    """The page of one model."""
    blocks = [_block(f"s{number}", site, model) for number, site in enumerate(model.sites)]
    return render("report_upgrade.jinja", model=model, blocks=blocks, verdict_names=VERDICT_NAMES, same=SAME)


def _block(key: str, site: Site, model: ModelUpgrade) -> Block:
    third, text = ("the edit", site.edit) if site.edit else ("generated then", site.generated_then)
    columns = (f"upstream {model.old}", f"upstream {model.new}", third)
    texts = [textwrap.dedent(source) for source in (site.old_upstream, site.new_upstream, text)]
    return Block(key, site, columns if text else columns[:2], _table(texts, (site.old_line, site.new_line, 1)))


def align(old: Sequence[str], new: Sequence[str], generated: Sequence[str]) -> list[Aligned]:
    """The lines of three texts in rows: beside each line of the new one, the line of either other that it equals or replaces.

    Further lines of `old` and `generated` are in rows without the new text, above its next line.
    """
    old_partners, generated_partners = _partners(old, new), _partners(generated, new)
    rows: list[Aligned] = []
    i = k = 0
    for line in range(len(new) + 1):
        left = old_partners.get(line) if line < len(new) else len(old)
        right = generated_partners.get(line) if line < len(new) else len(generated)
        only_left = range(i, left) if left is not None else ()
        only_right = range(k, right) if right is not None else ()
        rows += [(a, None, b) for a, b in zip_longest(only_left, only_right)]
        i, k = left if left is not None else i, right if right is not None else k
        if line < len(new):
            rows.append((left, line, right))
            i, k = i + (left is not None), k + (right is not None)
    return rows


def _partners(other: Sequence[str], new: Sequence[str]) -> dict[int, int]:
    """Line of the new text -> the line of the `other` text that it equals or replaces."""
    found: dict[int, int] = {}
    for _, left, right in diff_blocks(other, new):
        found.update(zip(range(right.start, right.stop), range(left.start, left.stop), strict=False))
    return found


def _table(texts: Sequence[str], first_lines: Sequence[int]) -> Markup:
    """The rows of three texts, or of two if the third is empty."""
    columns = 3 if texts[2] else 2
    plain, html = [lines_of(text) for text in texts], [highlighted(text) for text in texts]
    rows: list[str] = []
    for marks, aligned, skipped in _in_view(align(*plain), plain, columns):
        if skipped:
            rows.append(f'<div class="skip">{skipped} lines are the same</div>')
            continue
        cells: list[str] = []
        for column, line in enumerate(aligned[:columns]):
            if line is None:
                cells.append('<b></b><pre class="e"></pre>')
                continue
            shown = f' class="w{" l" if column == 0 else ""}" style="--h:{HUES[column]}"' if marks[column] else ""
            text = struck(html[column][line]) if marks[column] and column == 0 else html[column][line]
            cells.append(f"<b>{line + first_lines[column]}</b><pre{shown}>{text}</pre>")
        rows.append(f'<div class="r{" x" if any(marks) else ""}">{"".join(cells)}</div>')
    return Markup(f'<section style="--n:{len(rows)}">{"".join(rows)}</section>')


HUES = (4, 140, 215)
"""Hues of the lines that the new release dropped, of those that it added, and of those that passes wrote."""


def _in_view(
    rows: Sequence[Aligned], texts: Sequence[Sequence[str]], columns: int
) -> Iterator[tuple[list[bool], Aligned, int]]:
    """Per row near a difference: the columns to mark, the row, and 0; per stretch left out: its length in place of the 0."""
    marks = [_marks(row, texts)[:columns] for row in rows]
    changed = [number for number, found in enumerate(marks) if any(found)]
    visible = {near for number in changed for near in range(number - CONTEXT, number + CONTEXT + 1)}
    for is_visible, group in groupby(range(len(rows)), key=visible.__contains__):
        numbers = list(group)
        if is_visible or len(numbers) < CONTEXT:
            yield from ((marks[number], rows[number], 0) for number in numbers)
        else:
            yield marks[numbers[0]], rows[numbers[0]], len(numbers)


def _marks(row: Aligned, texts: Sequence[Sequence[str]]) -> list[bool]:
    """Whether each column is marked: old and new if they differ, the generated one if it differs from the new."""
    old, new, generated = (None if line is None else text[line] for line, text in zip(row, texts, strict=True))
    return [old != new, old != new, generated != new]
