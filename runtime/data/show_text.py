"""What is learned, as text: green where there are colours, else in brackets.

document 2   chats.jsonl:7   tokens 118 to 239   40 of 121 learned
  template  │ <|im_start|>user⏎
  user      │ Hi
  assistant │ 【Hello<|im_end|>】
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchgen.runtime.data.pieces import Piece, Unit
from patchgen.runtime.data.shown import Document, Shown

OPEN, CLOSE, LINE_END = "【", "】", "⏎"
GREEN, DIM, BOLD, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
BAR = 40


def as_text(shown: Shown, *, colour: bool) -> str:
    """The figures, the lengths and the rows.

    Args:
        colour: for a terminal that shows colours.
    """
    lines = [*_figures(shown), "", f"lengths of documents, in tokens ({shown.scope})", *_histogram(shown.histogram)]
    if shown.problems:
        lines += ["", f"left out or cut: {shown.problems}"]
    for number, row in enumerate(shown.rows, 1):
        count = sum(bool(document.source) for document in row.documents)
        head = f"row {number} of {len(shown.rows)}   {row.tokens:,} tokens of at most {shown.budget:,}   "
        head += f"{count} document{'s' if count != 1 else ''}   "
        lines += ["", _bold(f"{head}{row.learned:,} learned   {row.padding:,} of padding", colour)]
        lines += [f"  {name} {shape}" for name, shape in row.fields.items()]
        for place, document in enumerate(row.documents, 1):
            lines += ["", *_document(place, document, colour)]
    return "\n".join(lines) + "\n"


def _figures(shown: Shown) -> list[str]:
    table = [("source", "documents", "tokens", "learned", "of its tokens")]
    table += [
        (
            one.source,
            f"{one.documents:,}",
            f"{one.tokens:,}",
            f"{one.learned:,}",
            f"{one.learned / max(1, one.tokens):.1%}",
        )
        for one in shown.figures
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    first = f"data.kind = {shown.kind}; figures of {shown.scope}"
    return [first, *("  ".join(_cells(line, widths)).rstrip() for line in table)]


def _cells(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for number, (cell, width) in enumerate(zip(line, widths, strict=True)):
        yield cell.rjust(width) if number else cell.ljust(width)


def _histogram(bins: Sequence[tuple[int, int, int]]) -> list[str]:
    most = max((count for _, _, count in bins), default=1)
    width = max((len(f"{last:,}") for _, last, _ in bins), default=1)
    return [
        f"{first:>{width},} to {last:>{width},}  {'█' * round(count / most * BAR) or ('▏' if count else '')} {count:,}"
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
    width = max((len(piece.role) for piece in document.pieces), default=0)
    for piece in document.pieces:
        lead = f"  {piece.role:<{width}} │ " if width else "  │ "
        own = "".join(_runs(piece, colour)).removesuffix("\n").split("\n")
        lines += [
            (lead if not place else f"  {'':<{width}} │ " if width else "  │ ") + part
            for place, part in enumerate(own)
        ]
    return lines


def _runs(piece: Piece, colour: bool) -> Iterator[str]:
    """The text of a piece, what is learned told apart."""
    run: list[Unit] = []
    for unit in [*piece.units, None]:
        if run and (unit is None or unit.learned != run[0].learned):
            text = "".join(map(_shown, run))
            before, behind = (GREEN, PLAIN) if colour and run[0].learned else (DIM, PLAIN) if colour else ("", "")
            if not colour and run[0].learned:
                before, behind = OPEN, CLOSE
            # Colours do not reach over the ends of lines: each has its own lead.
            yield (
                "\n".join(f"{before}{part}{behind}" if part or not colour else "" for part in text.split("\n"))
                if colour
                else (f"{before}{text}{behind}")
            )
            run = []
        if unit is not None:
            run.append(unit)


def _shown(unit: Unit) -> str:
    if unit.item:
        return f"[{unit.item}: {len(unit.ids)} tokens]"
    text = unit.text.replace("\r", "␍").replace("\x1b", "␛")
    text = text.replace("\n", f"{LINE_END}\n")
    return f"{text}[learns {unit.target!r}]" if unit.target else text


def _bold(text: str, colour: bool) -> str:
    return f"{BOLD}{text}{PLAIN}" if colour else text
