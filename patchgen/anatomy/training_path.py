"""What runs in training: the forwards of a file and what they call, without what the collator spares them.

Three forms stand for code that training does not reach, each told by its structure:

    if name is None: ...                        name is handed in: `position_ids`, or popped off `kwargs`
    if (name := kwargs.pop(...)) is not None: return name      what follows computes it
    if is_flash_attention_requested(...): ... else: ...        the other branch: attention without packed lengths
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from patchgen.anatomy.classes import FunctionNode, calls, dotted, own_attribute
from patchgen.source import Module

EAGER_TESTS = ("is_flash_attention_requested", "attends_by_lengths")  # upstream's, and what vision_sp makes of it
HANDED = ("position_ids",)  # what the data workers compute: see the pass position_id_func


@dataclass
class TrainingPath:
    """The forwards of a file, and the methods and functions of the file that they call."""

    module: Module
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    helpers: dict[str, FunctionNode] = field(default_factory=dict)

    def functions(self) -> Iterator[tuple[str, FunctionNode, str]]:
        """Each once: the name that `allow_sync` has for it (`Class.method`, or `function`), its node, and why all calls
        of it are excused, empty where one is not."""
        for block in self.module:
            if isinstance(block.node, ast.ClassDef):
                self.classes[block.name] = block.node
            elif isinstance(block.node, FunctionNode):
                self.helpers[block.name] = block.node
        plain = [(name, "forward", "") for name in self.classes]
        excused: list[tuple[str, str, str]] = []
        seen: set[str] = set()
        while plain or excused:  # excused calls last: one that is not excused decides
            owner, method, excuse = (plain or excused).pop(0)
            found = self._find(owner, method)
            if found is None or found[0] in seen:
                continue
            seen.add(found[0])
            yield *found, excuse
            for part, why in parts(found[1], excuse):
                for call in calls(part):
                    attribute = own_attribute(call.func)
                    name = call.func.id if isinstance(call.func, ast.Name) else ""
                    target = (owner, attribute, why) if attribute is not None else ("", name, why)
                    (excused if why else plain).append(target)

    def _find(self, owner: str, method: str) -> tuple[str, FunctionNode] | None:
        if not owner:
            return (method, self.helpers[method]) if method in self.helpers else None
        pending = [owner]
        while pending:
            node = self.classes.get(pending.pop(0))
            for member in node.body if node is not None else ():
                if isinstance(member, FunctionNode) and member.name == method:
                    return f"{node.name}.{method}", member
            pending += [dotted(base) for base in node.bases] if node is not None else []
        return None


class Test(ast.Expression):
    """The condition of an `if` or `while`."""


def parts(function: FunctionNode, excuse: str) -> Iterator[tuple[ast.AST, str]]:
    """Simple statements and conditions of a function, each with the reason why it does not run in training, if there is one.

    Below a seam's early return stands the eager path, which is left out.
    """
    yield from _parts(function.body, _handed_in(function), excuse)


def _parts(body: list[ast.stmt], handed: set[str], excuse: str) -> Iterator[tuple[ast.AST, str]]:
    """Simple statements and conditions in order, each with the reason why it does not run in training, if there is one.

    Args:
        body: the statements.
        handed: the names whose value the collator may hand in.
        excuse: the reason for all of them.
    """
    for statement in body:
        if _is_seam(statement):
            return
        blocks = [
            getattr(statement, name) for name in ("body", "orelse", "finalbody") if getattr(statement, name, None)
        ]
        if not isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
            yield statement, excuse
            continue
        if isinstance(statement, ast.For):
            yield statement.iter, excuse
        if not isinstance(statement, ast.If | ast.While):
            for block in blocks:
                yield from _parts(block, handed, excuse)
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
    """The names of a function whose value the collator may hand in: positions, and what is popped off `kwargs`."""
    parameters = {arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    popped = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.NamedExpr)
        if isinstance(node.value, ast.Call) and dotted(node.value.func) == "kwargs.pop"
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    return popped | (parameters & set(HANDED))


def _missing(test: ast.expr, handed: set[str]) -> str | None:
    """The handed-in name that the test `name is None`, or `... and name is None`, finds missing."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next((name for value in test.values if (name := _missing(value, handed))), None)
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and isinstance(test.ops[0], ast.Is):
        return test.left.id if test.left.id in handed else None
    return None


def _given_and_returned(statement: ast.If, handed: set[str]) -> list[str]:
    """The handed-in names that `if name is not None: return name`, here or in an `if` inside, returns."""
    for node in ast.walk(statement):
        if not isinstance(node, ast.If) or not any(isinstance(inner, ast.Return) for inner in node.body):
            continue
        compared = [
            test.left
            for test in ast.walk(node.test)
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
        ]
        names = [left.target.id if isinstance(left, ast.NamedExpr) else getattr(left, "id", "") for left in compared]
        if any(name in handed for name in names):
            return [name for name in names if name in handed]
    return []


def _is_seam(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(dotted(call.func) == "ops.serves" for call in calls(statement.test))
