"""A preview as text: tokens with a loss are green or, without colours, in brackets.

document 2   chats.jsonl:7   tokens 118 to 239   40 of 122 with loss
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
GREEN, DIM, BOLD, RESET = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
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
        lines += ["", f"bad, skipped or truncated samples: {preview.problems}"]
    for number, row in enumerate(preview.rows, 1):
        count = sum(bool(document.source) for document in row.documents)
        heading = f"row {number} of {len(preview.rows)}   {row.tokens:,} tokens of at most {preview.budget:,}   "
        heading += f"{count} document{'s' if count != 1 else ''}   "
        lines += ["", _bold(f"{heading}{row.learned:,} with loss   {row.padding:,} of padding", colour)]
        lines += [f"  {name} {shape}" for name, shape in row.fields.items()]
        for document_number, document in enumerate(row.documents, 1):
            lines += ["", *_document(document_number, document, colour)]
    return "\n".join(lines) + "\n"


def _figures(preview: Preview) -> list[str]:
    table = [("source", "documents", "tokens", "with loss", "share with loss")]
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
    heading = f"data.kind = {preview.kind}; figures of {preview.scope}"
    return [heading, *("  ".join(_aligned(cells, widths)).rstrip() for cells in table)]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
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
        return [f"padding   {document.tokens:,} tokens, none with loss"]
    parts = [
        f"document {number}",
        document.half,
        document.where,
        f"tokens {document.start} to {document.start + document.tokens - 1}",
    ]
    parts += [f"{document.learned} of {document.tokens} with loss"]
    if document.label is not None:
        parts.append(f"label {document.label:g}")
    lines = [_bold("   ".join(part for part in parts if part), colour)]
    width = max((len(run.role) for run in document.role_runs), default=0)
    for run in document.role_runs:
        prefix = f"  {run.role:<{width}} │ " if width else "  │ "
        text_lines = "".join(_text_of(run, colour)).removesuffix("\n").split("\n")
        lines += [
            (prefix if not index else f"  {'':<{width}} │ " if width else "  │ ") + text_line
            for index, text_line in enumerate(text_lines)
        ]
    return lines


def _text_of(run: RoleRun, colour: bool) -> Iterator[str]:
    """The text of a run, with marks around tokens with a loss."""
    for learned, units in itertools.groupby(run.units, lambda unit: unit.learned):
        text = "".join(map(_display, units))
        if colour:
            # Each line is coloured separately, because each has its own prefix.
            style = GREEN if learned else DIM
            yield "\n".join(f"{style}{part}{RESET}" if part else "" for part in text.split("\n"))
        else:
            yield f"{OPEN}{text}{CLOSE}" if learned else text


def _display(unit: Unit) -> str:
    if unit.item:
        return f"[{unit.item}: {len(unit.ids)} tokens]"
    text = unit.text.replace("\r", "␍").replace("\x1b", "␛")
    text = text.replace("\n", f"{LINE_END}\n")
    return f"{text}[target {unit.target!r}]" if unit.target else text


def _bold(text: str, colour: bool) -> str:
    return f"{BOLD}{text}{RESET}" if colour else text
