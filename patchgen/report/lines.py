"""Each line of a generated file: the upstream line that it is, or the pass that wrote it; and who removed the others.

The passes of a generation are followed one by one: what a pass left as it was keeps its origin.

    upstream  1 2 3 4 5        fused_loss replaces 3 and 4 by two lines of its own
    after     1 2 a b 5        origins: 1, 2, (fused_loss), (fused_loss), 5; 3 and 4 are removed by fused_loss
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from patchgen.pipeline import Generated

FINISH = "header and imports"
"""What is written after the passes: the record above the file, imports that are needed, and no others."""


@dataclass(frozen=True)
class Row:
    """A line of either side, or of both: numbers count from 1, 0 where the side has no line.

    Attributes:
        by: the pass that wrote or removed it; empty where both sides are one line.
    """

    left: int
    right: int
    by: str = ""


@dataclass(frozen=True)
class _Line:
    text: str
    origin: int  # in upstream's file, from 1; 0: `by` wrote it
    by: str = ""


def follow(generated: Generated) -> list[Row]:
    """The rows of upstream's file beside the generated one, in order; every line of both is in exactly one."""
    upstream = lines_of(generated.steps[0].before.text)
    lines = [_Line(text, number) for number, text in enumerate(upstream, start=1)]
    removed: dict[int, str] = {}
    for name, text in _texts(generated):
        lines = _changed(lines, lines_of(text), name, removed)
    rows, last = [], 0
    for number, line in enumerate(lines, start=1):
        for gone in range(last + 1, line.origin):
            rows.append(Row(gone, 0, removed[gone]))
        last = max(last, line.origin)
        rows.append(Row(line.origin, number, line.by))
    return rows + [Row(gone, 0, removed[gone]) for gone in range(last + 1, len(upstream) + 1)]


def lines_of(text: str) -> list[str]:
    """The lines as Python counts them: a form feed ends none."""
    return text.removesuffix("\n").split("\n") if text else []


def _texts(generated: Generated) -> Iterator[tuple[str, str]]:
    """Who wrote, and the file as he left it."""
    for step in generated.steps:
        if step.before.text != step.outcome.module.text:
            yield step.name, step.outcome.module.text
    yield FINISH, generated.text


def _changed(lines: list[_Line], texts: Sequence[str], by: str, removed: dict[int, str]) -> list[_Line]:
    """The lines after a pass; what it removed of upstream's is noted with its name."""
    found: list[_Line] = []
    for kind, left, right in opcodes([line.text for line in lines], texts):
        if kind == "equal":
            found += lines[left]
            continue
        removed.update({line.origin: by for line in lines[left] if line.origin})
        writers = {line.text: line.by for line in lines[left] if line.by}
        found += [_Line(text, 0, writers.get(_uncommented(text), by)) for text in texts[right]]
    return found


def _uncommented(text: str) -> str:
    """A line of a pass without what was said of its operation: it is still that pass's."""
    mark, parenthesis, _ = text.partition(" (")
    return mark if parenthesis and mark.lstrip().startswith("# patchgen: ") else text.rpartition("  # ")[0]


def opcodes(before: Sequence[str], after: Sequence[str]) -> list[tuple[str, slice, slice]]:
    """What difflib finds, with equal ends cut off first, which is most of a file."""
    start = _common(zip(before, after, strict=False))
    shorter = min(len(before), len(after)) - start
    end = min(_common(zip(reversed(before), reversed(after), strict=False)), shorter)
    matcher = difflib.SequenceMatcher(
        None, before[start : len(before) - end], after[start : len(after) - end], autojunk=False
    )
    found = [("equal", slice(0, start), slice(0, start))]
    for kind, i, j, k, m in matcher.get_opcodes():
        found.append((kind, slice(start + i, start + j), slice(start + k, start + m)))
    found.append(("equal", slice(len(before) - end, len(before)), slice(len(after) - end, len(after))))
    return found


def _common(pairs: Iterable[tuple[str, str]]) -> int:
    count = 0
    for one, other in pairs:
        if one != other:
            break
        count += 1
    return count
