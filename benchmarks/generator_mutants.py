"""Mutants of the generator's modules: applicable operators of `patchgen.mutation`, negated conditions and memberships.

Excluded are mutants that no test could catch, or that every test would: messages and `raise` statements, annotations, `__repr__`,
`zip(strict=)`, `.get(key, None)` without its default, and the arguments of `isinstance`, of which most others are a TypeError.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator

from patchgen.anatomy.classes import dotted
from patchgen.mutation import expressions
from patchgen.mutation.edits import Mutant, Place, Source
from patchgen.mutation.expressions import ExpressionOperator, Forms
from patchgen.mutation.statements import StatementOperator, dropped

MESSAGE_CALLS = {"Missed", "PassMismatch", "EmissionError", "ConfigError", "difflib.get_close_matches"}
UNMUTATED_METHODS = ("__repr__", "__str__")
CLASS_TESTS = {"isinstance", "issubclass"}


def conditions(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    """The negated condition of a statement or a ternary, and a comprehension without one of its conditions."""
    if node is getattr(place.statement, "test", None):
        yield _negated(node)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(_negated(node.test), node.body, node.orelse)
    for i, loop in enumerate(getattr(node, "generators", ())):
        for j in range(len(loop.ifs)):
            changed = copy.deepcopy(node)
            del getattr(changed, "generators")[i].ifs[j]  # noqa: B009
            yield changed


def _negated(condition: ast.expr) -> ast.expr:
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        return condition.operand
    return ast.UnaryOp(ast.Not(), condition)


def memberships(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    other = {ast.In: ast.NotIn, ast.NotIn: ast.In}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in other:
        yield ast.Compare(node.left, [other[type(node.ops[0])](), *node.ops[1:]], node.comparators)


def without_pointless(forms: Forms) -> Forms:
    """The same forms without those that no test, or every test, would notice."""

    def kept(node: ast.expr, place: Place) -> Iterator[ast.expr]:
        if not any(node is part for untested in _untested_parts(place.statement) for part in ast.walk(untested)):
            yield from (form for form in forms(node, place) if not _is_pointless(node, form))

    return kept


def _untested_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Parts of a statement that make a message, and annotations."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Raise):
            yield node
        elif isinstance(node, ast.Call) and dotted(node.func) in MESSAGE_CALLS:
            yield from node.args
            yield from (keyword.value for keyword in node.keywords)
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation


def _is_pointless(old: ast.expr, new: ast.expr) -> bool:
    """Whether a call with other arguments is no other call to a test; other forms, as its negation, are not pointless."""
    if not (isinstance(old, ast.Call) and isinstance(new, ast.Call)):
        return False
    name = dotted(old.func)
    if name in CLASS_TESTS | MESSAGE_CALLS:
        return True
    if isinstance(old.func, ast.Attribute) and old.func.attr == "get":
        return [ast.unparse(argument) for argument in old.args] == [*map(ast.unparse, new.args), "None"]
    lost = {keyword.arg for keyword in old.keywords} - {keyword.arg for keyword in new.keywords}
    return name == "zip" and lost == {"strict"}


OPERATORS = (
    ExpressionOperator("constant", without_pointless(expressions.constants)),
    ExpressionOperator("operator", without_pointless(expressions.operators)),
    ExpressionOperator("membership", without_pointless(memberships)),
    ExpressionOperator("condition", without_pointless(conditions)),
    ExpressionOperator("argument dropped", without_pointless(expressions.dropped_arguments)),
    ExpressionOperator("arguments swapped", without_pointless(expressions.swapped_arguments)),
    ExpressionOperator("another argument", without_pointless(expressions.other_arguments)),
    StatementOperator("statement dropped", dropped),
)


def drawn(text: str, seed: str) -> Iterator[tuple[int, Mutant]]:
    """Pairs of a line and the mutant of the statement there: the operators in turn, each at most once per statement."""
    generator = random.Random(seed)
    places = [place for place in Source(text).places() if place.function.name not in UNMUTATED_METHODS]
    orders = [generator.sample(places, len(places)) for _ in OPERATORS]
    turns = list(zip(OPERATORS, map(iter, orders), strict=True))
    generator.shuffle(turns)
    drawn_texts = {text}
    while turns:
        for turn in list(turns):
            operator, waiting = turn
            mutant = next(
                (candidate for candidate in (_one_of(operator, place, generator) for place in waiting) if candidate),
                None,
            )
            if mutant is None:
                turns.remove(turn)
            elif mutant[1].text not in drawn_texts:
                drawn_texts.add(mutant[1].text)
                yield mutant


def _one_of(operator, place: Place, generator: random.Random) -> tuple[int, Mutant] | None:
    mutants = list(operator.mutants(place))
    return (place.statement.lineno, generator.choice(mutants)()) if mutants else None
