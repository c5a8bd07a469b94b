"""Mutants of the generator: what is changed and what is not, and that a statement is known by the tests that execute it."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from generator_mutants import OPERATORS, drawn
from generator_trials import Executed, _mark

SOURCE = textwrap.dedent(
    '''
    """A module."""

    def sizes(parts, limit: int = 3, other=None) -> list:
        """Of the parts."""
        if not isinstance(parts, list) or limit in (1, 2):
            raise ValueError(f"{parts[0]} is none of {limit + 1}")
        found: dict[str, 4] = dict(zip(parts, limit, strict=True))
        found.update(parts, other)
        return [one for one in found if one.get(limit, None) is not None]

    class Part:
        def __repr__(self):
            return str(7)
    '''
)


def changes() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line, mutant in drawn(SOURCE, "0"):
        assert mutant.where.endswith(f"line {line}")
        ast.parse(mutant.text)
        found.setdefault(mutant.operator, set()).add(mutant.change)
    return found


def test_each_operator_draws_and_a_seed_draws_the_same():
    assert changes() == changes()
    assert set(changes()) == {operator.name for operator in OPERATORS}


def test_what_no_test_tells_is_left_as_it_is():
    told = " ".join(change for of_operator in changes().values() for change in of_operator)
    for idle in ("isinstance(list, parts)", "limit + 1 ->", "4 ->", "7 ->", "one.get(limit) ", "zip(parts, limit) "):
        assert idle not in told


def test_a_class_test_is_negated_and_a_key_is_changed():
    source = (
        "def size(part, table):\n    if isinstance(part, list):\n        return table.get(part, None)\n    return 0\n"
    )
    found = {mutant.change for _, mutant in drawn(source, "0")}
    assert "isinstance(part, list) -> not isinstance(part, list)" in found
    assert "table.get(part, None) -> table.get(None)" in found
    assert not any(change.startswith("table.get(part, None) -> table.get(part)") for change in found)


def test_a_statement_is_known_by_the_tests_that_execute_it():
    tree = ast.parse(SOURCE)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            _mark(function.body, "m.py")
    ran: set[str] = set()
    scope = {"__ran__": ran.add}
    exec(compile(ast.fix_missing_locations(tree), "m.py", "exec"), scope)
    assert ran == set()
    with pytest.raises(IndexError):
        scope["sizes"]((), 5)
    assert ran == {"m.py:5", "m.py:6", "m.py:7"}
    executed = Executed(
        ["m.py:1"],
        {"a": ["m.py:6"], "b": ["m.py:6", "m.py:20"], "c": [], "below": ["m.py:6", "m.py:8"]},
        {"a": 2.0, "b": 1.0, "c": 3.0, "below": 9.0},
    )
    assert executed.tests_of("m.py", 6, Counter()) == ["below", "b", "a"]
    assert executed.tests_of("m.py", 6, Counter(a=1)) == ["below", "a", "b"]
    assert executed.tests_of("m.py", 1, Counter()) == ["b", "a", "below", "c"]
    assert executed.tests_of("m.py", 9, Counter()) == []
