"""What runs in training: the forwards of a file and what they call, except what values of the collator make unnecessary.

Training does not reach code of five forms, each recognised by its structure:

    if name is None: ...                        the collator passes name: `position_ids`, sizes, or what is popped off `kwargs`;
                                                also beside other conditions: `... and name is None`
    name = name or ...                          likewise
    if name is not None: return ...             likewise, for the code that follows; also with `(name := kwargs.pop(...))`
    if is_flash_attention_requested(...): ... else: ...        the other branch: attention without packed lengths
    if ops.serves(...): return ...              the code that follows: upstream's, below a seam
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

# Upstream's, and what vision_sp writes instead.
PACKED_LENGTH_TESTS = ("is_flash_attention_requested", "attends_by_lengths")
PRECOMPUTED = ("position_ids",)  # by the data workers: see the pass position_id_func


def reachable_functions(module: Module) -> Iterator[tuple[str, FunctionNode, str]]:
    """The forwards of a file, and the methods and functions of the file that they call, each once.

    Yields for each its name as in `allow_sync` (`Class.method`, or `function`), its node, and the reason why training runs none
    of its calls, "" if it runs one.
    """
    nodes = {block.name: block.node for block in module if block.name is not None}
    classes = {name: node for name, node in nodes.items() if isinstance(node, ast.ClassDef)}
    bases = {name: [dotted(base) for base in node.bases] for name, node in classes.items()}
    scopes = [("", node) for node in nodes.values()]
    scopes += [(name, member) for name, node in classes.items() for member in node.body]
    functions = {(owner, node.name): node for owner, node in reversed(scopes) if isinstance(node, FunctionNode)}
    pending = [(name, "forward", "") for name in classes]
    pending_excused: list[tuple[str, str, str]] = []
    visited: set[tuple[str, str]] = set()
    while pending or pending_excused:  # excused calls last: one call that is not excused decides
        owner, method, excuse = (pending or pending_excused).pop(0)
        found = next(((of, method) for of in linearised(owner, bases) or [""] if (of, method) in functions), None)
        if found is None or found in visited:
            continue
        visited.add(found)
        yield ".".join(filter(None, found)), functions[found], excuse
        for part, why in statements_with_reasons(functions[found], excuse):
            for call in calls(part):
                callees = [("", call.func.id)] if isinstance(call.func, ast.Name) else []
                own_methods = map(own_attribute, (call.func, *call.args))  # an op may call its arguments
                callees += [(owner, attribute) for attribute in own_methods if attribute is not None]
                (pending_excused if why else pending).extend((*owner_and_name, why) for owner_and_name in callees)


class Condition(ast.Expression):
    """The condition of an `if` or `while`."""


def statements_with_reasons(function: FunctionNode, excuse: str) -> Iterator[tuple[ast.AST, str]]:
    """The simple statements and conditions of a function, each with the reason why training does not run it, or "".

    The eager path after a seam's early return is left out. `excuse` is a reason that holds for the whole function.
    """
    yield from _statements_with_reasons(function.body, _precomputed_names(function), excuse)


def _statements_with_reasons(
    body: list[ast.stmt], precomputed: set[str], excuse: str
) -> Iterator[tuple[ast.AST, str]]:
    """`statements_with_reasons` of a body; `precomputed` are the names whose values the collator may pass."""
    for statement in body:
        if _is_seam(statement):
            return
        if not isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
            absent = _tested_as_absent(getattr(statement, "value", statement), precomputed)
            yield statement, excuse or (f"only where {absent} is not handed in" if absent else "")
            continue
        if isinstance(statement, ast.For):
            yield statement.iter, excuse
        if isinstance(statement, ast.With):
            yield from ((item.context_expr, excuse) for item in statement.items)
        if not isinstance(statement, ast.If | ast.While):
            handlers = [handler.body for handler in getattr(statement, "handlers", [])]
            for block in (*(getattr(statement, name, []) for name in ("body", "orelse", "finalbody")), *handlers):
                yield from _statements_with_reasons(block, precomputed, excuse)
            continue
        yield Condition(statement.test), excuse
        absent = _tested_as_absent(statement.test, precomputed)
        has_eager_else = any(dotted(call.func).endswith(PACKED_LENGTH_TESTS) for call in calls(statement.test))
        body_reason = f"only where {absent} is not handed in" if absent else ""
        yield from _statements_with_reasons(statement.body, precomputed, excuse or body_reason)
        else_reason = "attention without packed lengths" if has_eager_else else ""
        yield from _statements_with_reasons(statement.orelse, precomputed, excuse or else_reason)
        given = _names_of_early_return(statement, precomputed)
        if given and not excuse:  # the code below computes what was not passed
            excuse = f"only where {' and '.join(given)} is not handed in"


def _precomputed_names(function: FunctionNode) -> set[str]:
    """The names of a function whose values the collator may pass: positions, sizes, and what is popped off `kwargs`."""
    assigned = [node for node in walk(function) if isinstance(node, ast.Assign | ast.NamedExpr)]
    popped = [n for n in assigned if isinstance(n.value, ast.Call) and dotted(n.value.func) == "kwargs.pop"]
    names = {target.id for node in popped for target in targets(node) if isinstance(target, ast.Name)}
    return names | handed_sizes(function) | (set(parameter_names(function)) & set(PRECOMPUTED))


def _tested_as_absent(test: ast.AST, precomputed: set[str]) -> str | None:
    """The name of `precomputed` in the test `name is None`, `... and name is None` or `name or ...`; None if there is none."""
    match test:
        case ast.BoolOp(ast.Or(), [ast.Name(name), *_]) if name in precomputed:
            return name
        case ast.BoolOp(ast.And(), values):
            return next((name for value in values if (name := _tested_as_absent(value, precomputed))), None)
        case ast.Compare(ast.Name(name), [ast.Is()], [ast.Constant(None)]) if name in precomputed:
            return name
    return None


def _names_of_early_return(statement: ast.stmt, precomputed: set[str]) -> list[str]:
    """The names of `precomputed` tested by an `if name is not None:` that returns, at this statement or inside it."""
    for node in walk(statement):
        if isinstance(node, ast.If) and any(isinstance(inner, ast.Return) for inner in node.body):
            given = [name for test in walk(node.test) if (name := _tested_as_present(test)) in precomputed]
            if given:
                return given
    return []


def _tested_as_present(test: ast.AST) -> str:
    """The name in `name is not None` or `(name := ...) is not None`; "" for other code."""
    match test:
        case ast.Compare(ast.Name(name) | ast.NamedExpr(ast.Name(name)), [ast.IsNot()], [ast.Constant(None)]):
            return name
        case _:
            return ""


def _is_seam(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(dotted(call.func) == "ops.serves" for call in calls(statement.test))
