"""What runs in training: the forwards of a file and what they call, except what values of the collator make unnecessary.

Training does not reach code of four forms, each recognised by its structure:

    if name is None: ...                        the collator passes name: `position_ids`, sizes, or popped off `kwargs`
    name = name or ...                          likewise
    if (name := kwargs.pop(...)) is not None: return name      likewise, for the code that follows
    if is_flash_attention_requested(...): ... else: ...        the other branch: attention without packed lengths
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterator

from patchgen.anatomy.classes import (
    FunctionNode,
    calls,
    dotted,
    linearised,
    own_attribute,
    parameter_names,
    targets,
    walk,
)
from patchgen.anatomy.media import handed_sizes
from patchgen.source import Module

EAGER_TESTS = ("is_flash_attention_requested", "attends_by_lengths")  # upstream's, and what vision_sp writes instead
HANDED = ("position_ids",)  # the data workers compute it: see the pass position_id_func


def training_functions(module: Module) -> Iterator[tuple[str, FunctionNode, str]]:
    """The forwards of a file, and the methods and functions of the file that they call, each once.

    Yields its name as in `allow_sync` (`Class.method`, or `function`), its node, and the reason why training runs none of its
    calls, "" if it runs one.
    """
    nodes = {block.name: block.node for block in module if block.name is not None}
    classes = {name: node for name, node in nodes.items() if isinstance(node, ast.ClassDef)}
    bases = {name: [dotted(base) for base in node.bases] for name, node in classes.items()}
    members = [("", node) for node in nodes.values()]
    members += [(name, member) for name, node in classes.items() for member in node.body]
    functions = {(owner, node.name): node for owner, node in reversed(members) if isinstance(node, FunctionNode)}
    plain = [(name, "forward", "") for name in classes]
    excused: list[tuple[str, str, str]] = []
    visited: set[tuple[str, str]] = set()
    while plain or excused:  # excused calls last: one call that is not excused decides
        owner, method, excuse = (plain or excused).pop(0)
        found = next(((of, method) for of in linearised(owner, bases) or [""] if (of, method) in functions), None)
        if found is None or found in visited:
            continue
        visited.add(found)
        yield ".".join(filter(None, found)), functions[found], excuse
        for part, why in parts(functions[found], excuse):
            for call in calls(part):
                named = [("", call.func.id)] if isinstance(call.func, ast.Name) else []
                handed = (own_attribute(given) for given in (call.func, *call.args))  # an op may call its arguments
                named += [(owner, attribute) for attribute in handed if attribute is not None]
                (excused if why else plain).extend((*owner_and_name, why) for owner_and_name in named)


class Test(ast.Expression):
    """The condition of an `if` or `while`."""


def parts(function: FunctionNode, excuse: str) -> Iterator[tuple[ast.AST, str]]:
    """The simple statements and conditions of a function, each with the reason why training does not run it, or "".

    The eager path after a seam's early return is left out. `excuse` is a reason that holds for the whole function.
    """
    yield from _parts(function.body, _handed_in(function), excuse)


def _parts(body: list[ast.stmt], handed: set[str], excuse: str) -> Iterator[tuple[ast.AST, str]]:
    """`parts` of statements; `handed` are the names whose values the collator may pass."""
    for statement in body:
        if _is_seam(statement):
            return
        if not isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
            missing = _missing(getattr(statement, "value", statement), handed)
            yield statement, excuse or (f"only where {missing} is not handed in" if missing else "")
            continue
        if isinstance(statement, ast.For):
            yield statement.iter, excuse
        if isinstance(statement, ast.With):
            yield from ((item.context_expr, excuse) for item in statement.items)
        if not isinstance(statement, ast.If | ast.While):
            handlers = [handler.body for handler in getattr(statement, "handlers", [])]
            for block in (*(getattr(statement, name, []) for name in ("body", "orelse", "finalbody")), *handlers):
                yield from _parts(block, handed, excuse)
            continue
        yield Test(statement.test), excuse
        missing = _missing(statement.test, handed)
        eager = any(dotted(call.func).endswith(EAGER_TESTS) for call in calls(statement.test))
        inside = f"only where {missing} is not handed in" if missing else ""
        yield from _parts(statement.body, handed, excuse or inside)
        yield from _parts(statement.orelse, handed, excuse or ("attention without packed lengths" if eager else ""))
        given = _given_and_returned(statement, handed)
        if given and not excuse:  # the code below computes what was not passed
            excuse = f"only where {' and '.join(given)} is not handed in"


def _handed_in(function: FunctionNode) -> set[str]:
    """The names of a function whose values the collator may pass: positions, sizes, and what is popped off `kwargs`."""
    assigned = [node for node in walk(function) if isinstance(node, ast.Assign | ast.NamedExpr)]
    popped = [n for n in assigned if isinstance(n.value, ast.Call) and dotted(n.value.func) == "kwargs.pop"]
    names = {target.id for node in popped for target in targets(node) if isinstance(target, ast.Name)}
    return names | handed_sizes(function) | (set(parameter_names(function)) & set(HANDED))


def _missing(test: ast.AST, handed: set[str]) -> str | None:
    """The name of `handed` in the test `name is None`, `... and name is None` or `name or ...`; None if there is none."""
    match test:
        case ast.BoolOp(ast.Or(), [ast.Name(name), *_]) if name in handed:
            return name
        case ast.BoolOp(ast.And(), values):
            return next((name for value in values if (name := _missing(value, handed))), None)
        case ast.Compare(ast.Name(name), [ast.Is()], [ast.Constant(None)]) if name in handed:
            return name
    return None


def _given_and_returned(statement: ast.stmt, handed: set[str]) -> list[str]:
    """The names of `handed` tested by an `if name is not None:` that returns, at this statement or inside it."""
    for node in walk(statement):
        if isinstance(node, ast.If) and any(isinstance(inner, ast.Return) for inner in node.body):
            given = [name for test in walk(node.test) if (name := _tested_for_value(test)) in handed]
            if given:
                return given
    return []


def _tested_for_value(test: ast.AST) -> str:
    """The name in `name is not None` or `(name := ...) is not None`; "" for other code."""
    match test:
        case ast.Compare(ast.Name(name) | ast.NamedExpr(ast.Name(name)), [ast.IsNot()], [ast.Constant(None)]):
            return name
        case _:
            return ""


def _is_seam(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(dotted(call.func) == "ops.serves" for call in calls(statement.test))
