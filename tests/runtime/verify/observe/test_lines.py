"""The lines of a file that nothing ran are found, and tracing that was there before goes on."""

from __future__ import annotations

import sys

from patchgen.runtime import registry
from patchgen.runtime.verify.observe import lines

CODE = """import os

LIMIT = 3


class Example:
    def forward(self, x):
        if x > LIMIT:
            x = x * 2
            return x
        return [
            item
            for item in range(x)
        ]

    def never(self):
        return os.sep
"""


def test_lines_of_functions_that_did_not_run_are_listed_as_ranges(tmp_path):
    file = tmp_path / "modeling_example.py"
    file.write_text(CODE)
    example = registry.import_file(file).Example()
    before = sys.gettrace()
    with lines.executed(str(file)) as small:
        example.forward(2)
    with lines.executed(str(file)) as large:
        example.forward(5)
    assert lines.not_executed(str(file), small) == ("9-10", "17")
    assert lines.not_executed(str(file), small | large) == ("17",)
    assert sys.gettrace() is before
