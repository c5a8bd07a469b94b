"""Which line of the generated file does something, from the stack."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import patchgen

# As files are named when they are imported: by links, in a source tree.
_PACKAGE = inspect.getfile(patchgen).removesuffix("__init__.py")
_RUN, _VERIFY = (f"{_PACKAGE}runtime", f"{_PACKAGE}kernels"), f"{_PACKAGE}runtime/verify"


def is_of_runtime(file: str) -> bool:
    """Whether a file is code that a run executes besides the generated file."""
    return file.startswith(_RUN) and not file.startswith(_VERIFY)


class Source:
    """A generated file while its code runs.

    Attributes:
        module: of the generated class.
        file: as its code objects name it.
    """

    def __init__(self, generated_class: type) -> None:
        self.module = sys.modules[generated_class.__module__]
        self.file = inspect.getfile(generated_class)
        self._lines = Path(self.file).read_text(encoding="utf-8").splitlines()

    def running_line(self) -> int | None:
        """The innermost running line of the file; None outside of it, and in functions of the runtime that it calls: these know
        the ranks."""
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self.file:
                return frame.f_lineno
            if is_of_runtime(name):
                return None
            frame = frame.f_back
        return None

    def code(self, line: int) -> str:
        """A line without its indentation; empty for 0."""
        return self._lines[line - 1].strip() if line else ""

    def line_naming(self, name: str) -> int:
        """The last line with a name, which is where a value is changed that no assignment names; 0 if there is none."""
        named = [number for number, text in enumerate(self._lines, 1) if re.search(rf"\b{re.escape(name)}\b", text)]
        return named[-1] if named else 0
