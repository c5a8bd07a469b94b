"""The origin of each line of a generated file: an upstream line, or the pass that wrote it; and which pass removed each other
upstream line.

The passes of a generation are traced one by one: a line that a pass leaves unchanged keeps its origin.

    upstream  1 2 3 4 5        fused_loss replaces 3 and 4 by two lines of its own
    after     1 2 a b 5        origins: 1, 2, (fused_loss), (fused_loss), 5; 3 and 4 are removed by fused_loss
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from patchgen.pipeline import Generated

FINISH = "header and imports"
"""The step after the passes: it writes the header, the imports, and the comments on operations."""


@dataclass(frozen=True)
class Row:
    """A line of either side, or of both: line numbers from 1, 0 if the side has no line.

    Attributes:
        by: the pass, or FINISH, that wrote or removed it; empty if both sides have the same line.
    """

    left: int
    right: int
    by: str = ""


@dataclass(frozen=True)
class _Line:
    text: str
    origin: int  # in upstream's file, from 1; 0 if `by` wrote it
    by: str = ""


def trace(generated: Generated) -> list[Row]:
    """The rows of upstream's file beside the generated one, in order; every line of both is in exactly one row."""
    upstream = lines_of(generated.steps[0].before.text)
    lines = [_Line(text, number) for number, text in enumerate(upstream, start=1)]
    removed: dict[int, str] = {}
    for name, text in _texts(generated):
        lines = _lines_after(lines, lines_of(text), name, removed)
    rows, last = list[Row](), 0
    for number, line in enumerate(lines, start=1):
        for left in range(last + 1, line.origin):
            rows.append(Row(left, 0, removed[left]))
        last = max(last, line.origin)
        rows.append(Row(line.origin, number, line.by))
    return rows + [Row(left, 0, removed[left]) for left in range(last + 1, len(upstream) + 1)]


def lines_of(text: str) -> list[str]:
    """The lines as Python counts them: a form feed does not end a line."""
    return text.removesuffix("\n").split("\n") if text else []


def _texts(generated: Generated) -> Iterator[tuple[str, str]]:
    """Each step that changed the text, and the text after it."""
    for step in generated.steps:
        if step.before.text != step.outcome.module.text:
            yield step.name, step.outcome.module.text
    yield FINISH, generated.text


def _lines_after(lines: list[_Line], texts: Sequence[str], by: str, removed: dict[int, str]) -> list[_Line]:
    """The lines after a pass; upstream lines that it removed are recorded in `removed` (line number -> pass)."""
    found: list[_Line] = []
    for kind, left, right in diff_blocks([line.text for line in lines], texts):
        if kind == "equal":
            found += lines[left]
            continue
        removed.update({line.origin: by for line in lines[left] if line.origin})
        writers = {line.text: line.by for line in lines[left] if line.by}
        found += [_Line(text, 0, writers.get(_uncommented(text), by)) for text in texts[right]]
    return found


def _uncommented(text: str) -> str:
    """The line as its pass wrote it, before FINISH added a comment on its operation; empty if it has no such comment."""
    mark, parenthesis, _ = text.partition(" (")
    return mark if parenthesis and mark.lstrip().startswith("# patchgen: ") else text.rpartition("  # ")[0]


def diff_blocks(before: Sequence[str], after: Sequence[str]) -> list[tuple[str, slice, slice]]:
    """The blocks that difflib finds (kind, lines before, lines after); equal starts and ends are split off first."""
    start = _prefix_length(zip(before, after, strict=False))
    shorter = min(len(before), len(after)) - start
    end = min(_prefix_length(zip(reversed(before), reversed(after), strict=False)), shorter)
    matcher = difflib.SequenceMatcher(
        None, before[start : len(before) - end], after[start : len(after) - end], autojunk=False
    )
    found = [("equal", slice(0, start), slice(0, start))]
    for kind, i, j, k, m in matcher.get_opcodes():
        found.append((kind, slice(start + i, start + j), slice(start + k, start + m)))
    found.append(("equal", slice(len(before) - end, len(before)), slice(len(after) - end, len(after))))
    return found


def _prefix_length(pairs: Iterable[tuple[str, str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
