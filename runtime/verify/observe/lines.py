"""The lines of a generated file that nothing ran, as ranges of numbers."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType


@contextlib.contextmanager
def executed(file: str) -> Iterator[set[int]]:
    """Collects the lines of a file that run inside the block; what traced before goes on after it."""
    lines: set[int] = set()
    done: set[CodeType] = set()
    remaining: dict[CodeType, set[int]] = {}

    def on_line(frame: FrameType, event: str, _: object):
        if event == "line":
            lines.add(frame.f_lineno)
            left = remaining[frame.f_code]
            left.discard(frame.f_lineno)
            if not left:
                done.add(frame.f_code)
        return on_line

    def on_call(frame: FrameType, event: str, _: object):
        code = frame.f_code
        if code.co_filename != file or code in done:
            return None
        if code not in remaining:
            remaining[code] = {line for _, _, line in code.co_lines() if line is not None} - lines
        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def not_executed(file: str, executed_lines: Iterable[int]) -> tuple[str, ...]:
    """The lines in functions of a file that are not among `executed_lines`, as "12" or "15-18"."""
    text = Path(file).read_text(encoding="utf-8")
    statements = set(_lines_of_functions(compile(text, file, "exec")))
    missing = statements - set(executed_lines)
    ranges: list[list[int]] = []
    for line in sorted(statements):
        if line not in missing:
            ranges.append([])
        elif not ranges or not ranges[-1]:
            ranges.append([line, line])
        else:
            ranges[-1][1] = line
    return tuple(str(a) if a == b else f"{a}-{b}" for a, b in filter(None, ranges))


def _lines_of_functions(code: CodeType) -> Iterator[int]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_NEWLOCALS and constant.co_flags & inspect.CO_OPTIMIZED:
                first = constant.co_firstlineno
                yield from (line for _, _, line in constant.co_lines() if line is not None and line != first)
            yield from _lines_of_functions(constant)
