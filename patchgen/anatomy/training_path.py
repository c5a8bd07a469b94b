"""What runs in training: the forwards of a file and what they call, without what the collator spares them.

Four forms stand for code that training does not reach, each told by its structure:

    if name is None: ...                        name is handed in: `position_ids`, sizes, or popped off `kwargs`
    name = name or ...                          likewise
    if (name := kwargs.pop(...)) is not None: return name      what follows computes it
    if is_flash_attention_requested(...): ... else: ...        the other branch: attention without packed lengths
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

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

EAGER_TESTS = ("is_flash_attention_requested", "attends_by_lengths")  # upstream's, and what vision_sp makes of it
HANDED = ("position_ids",)  # what the data workers compute: see the pass position_id_func


def training_functions(module: Module) -> Iterator[tuple[str, FunctionNode, str]]:
    """The forwards of a file, and the methods and functions of the file that they call, each once.

    Yields the name that `allow_sync` has for it (`Class.method`, or `function`), its node, and why all calls of it are
    excused, empty where one is not.
    """
    nodes = {block.name: block.node for block in module if block.name is not None}
    classes = {name: node for name, node in nodes.items() if isinstance(node, ast.ClassDef)}
    bases = {name: [dotted(base) for base in node.bases] for name, node in classes.items()}
    plain = [(name, "forward", "") for name in classes]
    excused: list[tuple[str, str, str]] = []
    visited: set[str] = set()
    while plain or excused:  # excused calls last: one that is not excused decides
        owner, method, excuse = (plain or excused).pop(0)
        members = [(f"{name}.", classes[name].body) for name in linearised(owner, bases)] or [
            ("", filter(None, [nodes.get(method)]))
        ]
        name, function = _find(members, method)
        if function is None or name in visited:
            continue
        visited.add(name)
        yield name, function, excuse
        for part, why in parts(function, excuse):
            for call in calls(part):
                named = [("", call.func.id)] if isinstance(call.func, ast.Name) else []
                handed = (own_attribute(given) for given in (call.func, *call.args))  # also what an op will call
                named += [(owner, attribute) for attribute in handed if attribute is not None]
                (excused if why else plain).extend((*owner_and_name, why) for owner_and_name in named)


def _find(members: Iterable[tuple[str, Iterable[ast.stmt]]], name: str) -> tuple[str, FunctionNode | None]:
    """The first function of that name, with the name of the class that it stands in before its own; None where none is."""
    found = (
        (f"{owner}{name}", node)
        for owner, nodes in members
        for node in nodes
        if isinstance(node, FunctionNode) and node.name == name
    )
    return next(found, ("", None))


class Test(ast.Expression):
    """The condition of an `if` or `while`."""


def parts(function: FunctionNode, excuse: str) -> Iterator[tuple[ast.AST, str]]:
    """Simple statements and conditions of a function, each with the reason why it does not run in training, if there is one.

    Below a seam's early return stands the eager path, which is left out.
    """
    yield from _parts(function.body, _handed_in(function), excuse)


def _parts(body: list[ast.stmt], handed: set[str], excuse: str) -> Iterator[tuple[ast.AST, str]]:
    """Of statements; `handed` are the names whose value the collator may hand in, `excuse` the reason for all of them."""
    for statement in body:
        if _is_seam(statement):
            return
        if not isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
            missing = _missing(getattr(statement, "value", statement), handed)
            yield statement, excuse or (f"only where {missing} is not handed in" if missing else "")
            continue
        if isinstance(statement, ast.For):
            yield statement.iter, excuse
        if not isinstance(statement, ast.If | ast.While):
            for block in ("body", "orelse", "finalbody"):
                yield from _parts(getattr(statement, block, []), handed, excuse)
            continue
        yield Test(statement.test), excuse
        missing = _missing(statement.test, handed)
        eager = any(dotted(call.func).endswith(EAGER_TESTS) for call in calls(statement.test))
        inside = f"only where {missing} is not handed in" if missing else ""
        yield from _parts(statement.body, handed, excuse or inside)
        yield from _parts(statement.orelse, handed, excuse or ("attention without packed lengths" if eager else ""))
        given = _given_and_returned(statement, handed)
        if given and not excuse:  # what follows computes what was not handed in
            excuse = f"only where {' and '.join(given)} is not handed in"


def _handed_in(function: FunctionNode) -> set[str]:
    """The names of a function whose value the collator may hand in: positions, sizes, and what is popped off `kwargs`."""
    assigned = [node for node in walk(function) if isinstance(node, ast.Assign | ast.NamedExpr)]
    popped = [n for n in assigned if isinstance(n.value, ast.Call) and dotted(n.value.func) == "kwargs.pop"]
    names = {target.id for node in popped for target in targets(node) if isinstance(target, ast.Name)}
    return names | handed_sizes(function) | (set(parameter_names(function)) & set(HANDED))


def _missing(test: ast.AST, handed: set[str]) -> str | None:
    """The handed-in name that the test `name is None`, or `... and name is None`, or `name or ...`, finds missing."""
    match test:
        case ast.BoolOp(ast.Or(), [ast.Name(name), *_]) if name in handed:
            return name
        case ast.BoolOp(ast.And(), values):
            return next((name for value in values if (name := _missing(value, handed))), None)
        case ast.Compare(ast.Name(name), [ast.Is()], [ast.Constant(None)]) if name in handed:
            return name
    return None


def _given_and_returned(statement: ast.stmt, handed: set[str]) -> list[str]:
    """The handed-in names that `if name is not None: return name`, here or in an `if` inside, returns."""
    for node in walk(statement):
        if isinstance(node, ast.If) and any(isinstance(inner, ast.Return) for inner in node.body):
            given = [name for test in walk(node.test) if (name := _tested_for_value(test)) in handed]
            if given:
                return given
    return []


def _tested_for_value(test: ast.AST) -> str:
    """The name in `name is not None`, or in `(name := ...) is not None`."""
    match test:
        case ast.Compare(ast.Name(name) | ast.NamedExpr(ast.Name(name)), [ast.IsNot()], [ast.Constant(None)]):
            return name
        case _:
            return ""


def _is_seam(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(dotted(call.func) == "ops.serves" for call in calls(statement.test))
