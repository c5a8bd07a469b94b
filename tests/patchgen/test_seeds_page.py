"""The page of what the project started from names tests and files that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "seeds.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PLACE = re.compile(r"`((?:runtime|kernels|patchgen|recipes|docs)/[\w/.]*)`")


def rows() -> list[list[str]]:
    """The cells of every row that names a test where others name one; those of the last section say why they do not."""
    shown = PAGE.read_text().partition("## What does not work")[0]
    lines = [line for line in shown.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if row[0] not in ("what", "---")]


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_row_names_tests_and_places_that_are_there(row):
    assert len(row) == 3
    named = TEST.findall(row[2])
    assert named and TEST.sub("", row[2]).strip(" ,") == "", "a row names tests, as `file::name`"
    for file, name in named:
        assert name.startswith("test_") and name in functions(ROOT / file), f"{file} has no test {name}"
    for place in PLACE.findall(row[1]):
        assert (ROOT / place).exists(), place


def test_no_row_stands_twice_and_what_does_not_work_says_why():
    names = [row[0] for row in rows()]
    assert len(names) == len(set(names)) >= 79
    rest = PAGE.read_text().partition("## What does not work")[2]
    told = [line.split(" | ") for line in rest.splitlines() if line.startswith("| ")][2:]
    assert told and all(len(cells) == 2 and len(cells[1]) > 20 for cells in told)
