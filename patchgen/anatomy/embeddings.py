"""Which names of a model's forward hold the embeddings of its tokens, and whether it looks up positions that it counts."""

# pyright: reportMatchNotExhaustive=false

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from patchgen.anatomy.classes import FunctionNode, own_attribute, parameter_names, stored, walk
from patchgen.anatomy.flow import LINEAR, NONE, Flow, Marks
from patchgen.anatomy.known import POINTWISE

TABLE = "torch.nn.Embedding"
GETTER = "get_input_embeddings"  # transformers' method of every model
COUNTS = {"arange", "cumsum"}
KEEPS_SHAPE = POINTWISE | {"masked_scatter", "dropout"}


class Embeddings(Flow):
    """`[B, S, H]`: what a table of tokens gives for the ids, or what callers hand in, as long as it keeps its shape."""

    IDS, EMBEDDED, MAPPED = "ids", "embedded", "mapped"  # MAPPED: to another width

    def above(self, function: FunctionNode, before: Sequence[ast.stmt]) -> list[str]:
        """The names that hold them below these statements of the forward, in the order in which they are last bound."""
        self.values = {"input_ids": frozenset({self.IDS}), "inputs_embeds": frozenset({self.EMBEDDED})}
        self._statements(before)
        is_bound = {*parameter_names(function)} | {name for node in before for name in _bound(node)}
        nodes = [n for s in before for n in walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        lines = {n.id: n.lineno for n in sorted(nodes, key=lambda n: n.lineno)}
        bound = sorted(is_bound & lines.keys(), key=lambda name: lines[name])
        made, mapped = (
            [n for n in bound if mark in self.values.get(n, NONE)] for mark in (self.EMBEDDED, self.MAPPED)
        )
        return made or mapped

    def operation(self, name: str, operands: Sequence[Marks]) -> Marks:
        tensors = operands[1:] if name == "where" else operands[:1]
        return NONE.union(*tensors if name in KEEPS_SHAPE else [one & {self.IDS} for one in tensors])

    def module(self, name: str, call: ast.Call, operands: Sequence[Marks]) -> Marks:
        value, first = self.anatomy.attribute(self.owner, name), NONE.union(*operands[:1])
        if self.anatomy.is_a(value, LINEAR):
            return frozenset({self.MAPPED}) if first & {self.EMBEDDED, self.MAPPED} else NONE
        return first if self.anatomy.is_a(value, "torch.nn.Dropout", "torch.nn.LayerNorm") else NONE

    def value(self, node: ast.AST | None) -> Marks:
        match node:
            case ast.Subscript():
                return super().value(node) & {self.IDS}
            case ast.Compare() | ast.Attribute():
                return NONE
            case ast.Call(function, args, keywords):
                given = NONE.union(*map(self.value, (*args, *(keyword.value for keyword in keywords))))
                if self.IDS in given and self._is_table(function):
                    return frozenset({self.EMBEDDED})
                if (self.anatomy.names.resolve(function) or "").startswith(("transformers.", "builtins.")):
                    return NONE
        return super().value(node)

    def _is_table(self, function: ast.expr) -> bool:
        """Whether a call looks up ids: in a table, in a module of this file that has one, or in that of a model."""
        match function:
            case ast.Call(ast.Attribute(_, name), [], []):
                return name == GETTER
            case ast.Attribute(holder, name):
                owner = self.owner if own_attribute(function) else self._class_of(holder)
                built = {build.target or "" for build in self.anatomy.builds(owner) if build.attribute == name}
                inside = [
                    self.anatomy.classes[one]
                    for one in built | self.anatomy.built_by(built)
                    if one in self.anatomy.classes
                ]
                held = [
                    *self.anatomy.held(owner, name),
                    *(value for info in inside for value in info.attributes.values()),
                ]
                return any(self.anatomy.is_a(value, TABLE) for value in held)
        return False

    def _class_of(self, holder: ast.expr) -> str:
        builds = (*self.anatomy.builds(self.owner), *self.anatomy.auto_builds(self.owner))
        found = [self.anatomy.target_of(build) for build in builds if build.attribute == own_attribute(holder)]
        return next(filter(None, found), "")


class Counts(Flow):
    """Whether a model looks up in a table what it counts itself."""

    COUNTED = "counted"
    found = False

    def operation(self, name: str, operands: Sequence[Marks]) -> Marks | None:
        if name == "forward":  # of a table, which this class is
            self._look_up(ast.Name(self.owner, ast.Load()), operands)
        return frozenset({self.COUNTED}) if name in COUNTS else None

    def module(self, name: str, call: ast.Call, operands: Sequence[Marks]) -> Marks:
        self._look_up(self.anatomy.attribute(self.owner, name), operands)
        for build in self.anatomy.builds(self.owner):
            method = self.anatomy.method(build.target or "", "forward") if build.attribute == name else None
            if method is not None and method[1] not in self._running:
                inner = Counts(self.anatomy, build.target or "", self._running)
                inner.run(method[1])
                self.found |= inner.found
        return super().module(name, call, operands)

    def _look_up(self, table: ast.AST | None, operands: Sequence[Marks]) -> None:
        self.found |= self.anatomy.is_a(table, TABLE) and self.COUNTED in NONE.union(*operands)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds whichever of its branches runs."""
    if isinstance(statement, ast.If):
        body, orelse = (
            {name for one in branch for name in _bound(one)} for branch in (statement.body, statement.orelse)
        )
        yield from body & orelse
    else:
        yield from stored(statement)
