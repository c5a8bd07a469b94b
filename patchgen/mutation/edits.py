"""A source to mutate: its functions, their statements, and the text after a change."""

from __future__ import annotations

import ast
import copy
import hashlib
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from patchgen.anatomy.classes import FunctionNode


@dataclass(frozen=True)
class Mutant:
    """A changed source.

    Attributes:
        operator: the name of the operator that changed it.
        where: "Class.function line 12".
        change: what was changed, in one line, for a reader.
        text: the full source.
        keeps_meaning: it is meant to compute the same.
        modules: last part of the name -> source, of modules that it imports from its package.
    """

    operator: str
    where: str
    change: str
    text: str
    keeps_meaning: bool
    modules: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def digest(self) -> str:
        """Distinguishes it from other mutants of its model."""
        return hashlib.sha256("\0".join([self.text, *self.modules.values()]).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Place:
    """A statement in a function of the source.

    Attributes:
        block: the top-level statement that contains it.
        owner: the class, None for a top-level function.
        function: the method or function.
        body: the list of statements that contains it.
        index: its index there.
    """

    source: Source
    block: ast.stmt
    owner: ast.ClassDef | None
    function: FunctionNode
    body: list[ast.stmt]
    index: int

    @property
    def statement(self) -> ast.stmt:
        return self.body[self.index]

    @property
    def where(self) -> str:
        owner = f"{self.owner.name}." if self.owner is not None else ""
        return f"{owner}{self.function.name} line {self.statement.lineno}"

    def replaced(self, *statements: ast.stmt, span: int = 1, top: str = "") -> str:
        """The source with `span` statements from here on replaced; `top` is inserted above the block that contains them."""
        return self.source.spliced(self.body[self.index : self.index + span], statements, self.block, top)

    def with_expression(self, old: ast.expr, new: ast.expr, top: str = "") -> str:
        """The source with one expression of the statement replaced."""
        return self.replaced(_swapped(self.statement, old, new), top=top)


class Source:
    """A parsed source."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self.tree = ast.parse(text)

    def places(self, executed: Callable[[int, int], bool] = lambda first, last: True) -> Iterator[Place]:
        """Every statement in a top-level function or a method for which `executed(first line, last line)` holds.

        Docstrings, and statements in `except` and `case`, are left out.
        """
        for block in self.tree.body:
            owner = block if isinstance(block, ast.ClassDef) else None
            for function in owner.body if owner is not None else [block]:
                if isinstance(function, FunctionNode):
                    for body, index in _statements(function.body):
                        place = Place(self, block, owner, function, body, index)
                        statement = place.statement
                        if executed(statement.lineno, last_line(statement)) and not _is_docstring(statement):
                            yield place

    def spliced(
        self, old: list[ast.stmt], new: Iterable[ast.stmt], block: ast.stmt | None = None, top: str = ""
    ) -> str:
        """The text with the lines of `old` replaced by `new`, and `top` inserted above `block`."""
        first, last = old[0], old[-1]
        written = "\n".join(ast.unparse(ast.fix_missing_locations(statement)) for statement in new) or "pass"
        lines = [*self.lines]
        lines[first.lineno - 1 : last.end_lineno] = [textwrap.indent(written, " " * first.col_offset) + "\n"]
        if top and block is not None:
            lines.insert(first_line(block) - 1, top.rstrip("\n") + "\n\n\n")
        return "".join(lines)


def first_line(block: ast.stmt) -> int:
    """The line at which a statement begins, decorators included."""
    return min([block.lineno, *(node.lineno for node in getattr(block, "decorator_list", ()))])


def last_line(block: ast.stmt) -> int:
    """The line at which a statement ends."""
    return block.end_lineno or block.lineno


def expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Every expression of a statement, without those of nested statements."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                continue
            if isinstance(child, ast.expr):
                yield child
            pending.append(child)


def same_place(statement: ast.stmt, node: ast.AST, changed: ast.stmt) -> ast.AST:
    """The node of `changed`, a copy of `statement`, that corresponds to `node`."""
    pairs = zip(ast.walk(statement), ast.walk(changed), strict=True)
    return next(other for one, other in pairs if one is node)


def _swapped(statement: ast.stmt, old: ast.expr, new: ast.expr) -> ast.stmt:
    changed = copy.deepcopy(statement)
    twin = same_place(statement, old, changed)

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is twin else self.generic_visit(node)

    return Swap().visit(changed)


def _statements(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    for index, statement in enumerate(body):
        yield body, index
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, None) or [])


def stored_names(function: FunctionNode) -> set[str]:
    """The names that the body of a function assigns."""
    nodes = (node for statement in function.body for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
