"""A preview as text: tokens with a loss are green or, without colours, in brackets.

document 2   chats.jsonl:7   tokens 118 to 239   40 of 122 learned
  template  │ <|im_start|>user⏎
  user      │ Hi
  assistant │ 【Hello<|im_end|>】
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from patchgen.runtime.data.decoder import RoleRun, Unit
from patchgen.runtime.data.preview import Document, Preview

OPEN, CLOSE, LINE_END = "【", "】", "⏎"
GREEN, DIM, BOLD, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
BAR_WIDTH = 40


def as_text(preview: Preview, *, colour: bool) -> str:
    """The figures, the lengths and the rows.

    Args:
        colour: use terminal colours.
    """
    lines = [
        *_figures(preview),
        "",
        f"lengths of documents, in tokens ({preview.scope})",
        *_histogram(preview.histogram),
    ]
    if preview.problems:
        lines += ["", f"left out or cut: {preview.problems}"]
    for number, row in enumerate(preview.rows, 1):
        count = sum(bool(document.source) for document in row.documents)
        head = f"row {number} of {len(preview.rows)}   {row.tokens:,} tokens of at most {preview.budget:,}   "
        head += f"{count} document{'s' if count != 1 else ''}   "
        lines += ["", _bold(f"{head}{row.learned:,} learned   {row.padding:,} of padding", colour)]
        lines += [f"  {name} {shape}" for name, shape in row.fields.items()]
        for place, document in enumerate(row.documents, 1):
            lines += ["", *_document(place, document, colour)]
    return "\n".join(lines) + "\n"


def _figures(preview: Preview) -> list[str]:
    table = [("source", "documents", "tokens", "learned", "of its tokens")]
    table += [
        (
            source_figures.source,
            f"{source_figures.documents:,}",
            f"{source_figures.tokens:,}",
            f"{source_figures.learned:,}",
            f"{source_figures.learned / max(1, source_figures.tokens):.1%}",
        )
        for source_figures in preview.figures
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    first = f"data.kind = {preview.kind}; figures of {preview.scope}"
    return [first, *("  ".join(_cells(line, widths)).rstrip() for line in table)]


def _cells(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for column, (cell, width) in enumerate(zip(line, widths, strict=True)):
        yield cell.rjust(width) if column else cell.ljust(width)


def _histogram(bins: Sequence[tuple[int, int, int]]) -> list[str]:
    highest = max((count for _, _, count in bins), default=1)
    width = max((len(f"{last:,}") for _, last, _ in bins), default=1)
    return [
        f"{first:>{width},} to {last:>{width},}  {'█' * round(count / highest * BAR_WIDTH) or ('▏' if count else '')} {count:,}"
        for first, last, count in bins
    ]


def _document(number: int, document: Document, colour: bool) -> list[str]:
    if not document.source:
        return [f"padding   {document.tokens:,} tokens, none learned"]
    words = [
        f"document {number}",
        document.half,
        document.where,
        f"tokens {document.start} to {document.start + document.tokens - 1}",
    ]
    words += [f"{document.learned} of {document.tokens} learned"]
    if document.label is not None:
        words.append(f"label {document.label:g}")
    lines = [_bold("   ".join(word for word in words if word), colour)]
    width = max((len(run.role) for run in document.role_runs), default=0)
    for run in document.role_runs:
        prefix = f"  {run.role:<{width}} │ " if width else "  │ "
        parts = "".join(_text_of(run, colour)).removesuffix("\n").split("\n")
        lines += [
            (prefix if not place else f"  {'':<{width}} │ " if width else "  │ ") + part
            for place, part in enumerate(parts)
        ]
    return lines


def _text_of(run: RoleRun, colour: bool) -> Iterator[str]:
    """The text of a run, with marks around tokens with a loss."""
    for learned, units in itertools.groupby(run.units, lambda unit: unit.learned):
        text = "".join(map(_display, units))
        if colour:
            # Each line is coloured separately, because each has its own prefix.
            style = GREEN if learned else DIM
            yield "\n".join(f"{style}{part}{PLAIN}" if part else "" for part in text.split("\n"))
        else:
            yield f"{OPEN}{text}{CLOSE}" if learned else text


def _display(unit: Unit) -> str:
    if unit.item:
        return f"[{unit.item}: {len(unit.ids)} tokens]"
    text = unit.text.replace("\r", "␍").replace("\x1b", "␛")
    text = text.replace("\n", f"{LINE_END}\n")
    return f"{text}[learns {unit.target!r}]" if unit.target else text


def _bold(text: str, colour: bool) -> str:
    return f"{BOLD}{text}{PLAIN}" if colour else text
