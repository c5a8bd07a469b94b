"""Which names in a model's forward hold its token embeddings, and whether it looks up positions that it counts itself."""

# pyright: reportMatchNotExhaustive=false

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from patchgen.anatomy.classes import FunctionNode, arguments, loaded, own_attribute, parameter_names, stored, walk
from patchgen.anatomy.flow import LINEAR, NONE, Flow, Marks, Sources, handed
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.known import POINTWISE, made_buffers

TABLE = "torch.nn.Embedding"
GETTER = "get_input_embeddings"  # transformers' method of every model
COUNTS = {"arange", "cumsum"}
OTHER_CONTENT = {"zeros_like", "ones_like", "full_like", "detach"}  # changes to these do not reach the layers
KEEPS_SHAPE = POINTWISE - OTHER_CONTENT | {"masked_scatter", "dropout"}


class Embeddings(Flow):
    """Follows token embeddings `[B, S, H]`, looked up by the ids or passed in, while they keep their shape."""

    IDS, EMBEDDED, MAPPED = "ids", "embedded", "mapped"  # MAPPED: to another width

    def above(self, function: FunctionNode, before: Sequence[ast.stmt]) -> list[str]:
        """The names bound by these statements of the forward that hold the embeddings below them, in the order in which they
        are last bound; if there are none, those that hold embeddings mapped to another width."""
        self.values = {"input_ids": frozenset({self.IDS}), "inputs_embeds": frozenset({self.EMBEDDED})}
        self._statements(before)
        is_bound = {*parameter_names(function)} | {name for node in before for name in _bound(node)}
        nodes = [n for s in before for n in walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        last = {n.id: (n.lineno, n.col_offset) for n in sorted(nodes, key=lambda n: (n.lineno, n.col_offset))}
        bound = sorted(is_bound & last.keys(), key=lambda name: last[name])
        marks = (self.EMBEDDED, self.MAPPED)
        embedded, mapped = ([n for n in bound if mark in self.values.get(n, NONE)] for mark in marks)
        return embedded or mapped

    def operation(self, name: str, operands: Sequence[Marks]) -> Marks:
        tensors = operands[1:] if name == "where" else operands[:1]
        return NONE.union(*tensors if name in KEEPS_SHAPE else [marks & {self.IDS} for marks in tensors])

    def module(self, name: str, call: ast.Call, operands: Sequence[Marks]) -> Marks:
        value, first = self.anatomy.attribute(self.owner, name), NONE.union(*operands[:1])
        if self.anatomy.is_a(value, LINEAR):
            return frozenset({self.MAPPED}) if first & {self.EMBEDDED, self.MAPPED} else NONE
        return first if self.anatomy.is_a(value, "torch.nn.Dropout", "torch.nn.LayerNorm") else NONE

    def value(self, node: ast.AST | None) -> Marks:
        match node:
            case ast.Subscript():
                return super().value(node) & {self.IDS}
            case ast.Compare() | ast.Attribute() | ast.Lambda():
                return NONE
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                return NONE
            case ast.Dict() | ast.List() | ast.Set() | ast.Tuple():  # no tensor, whatever it holds
                super().value(node)
                return NONE
            case ast.Call(function, args, keywords):
                given = NONE.union(*map(self.value, (*args, *(keyword.value for keyword in keywords))))
                if self.IDS in given and self._is_table(function):
                    return frozenset({self.EMBEDDED})
                if (self.anatomy.names.resolve(function) or "").startswith(("transformers.", "builtins.")):
                    return NONE
        return super().value(node)

    def returned(self, value: ast.expr) -> Marks:
        return NONE.union(*map(self.value, value.elts if isinstance(value, ast.Tuple) else [value]))

    def _loop(self, loop: ast.For | ast.While) -> Marks:
        if isinstance(loop, ast.For):  # over the first dimension: its elements have another shape
            self._bind(loop.target, self.value(loop.iter) & {self.IDS})
        return self._branches(loop.body * 2, [])

    def _is_table(self, function: ast.expr) -> bool:
        """Whether what is called looks up ids: a table, a module of this file that contains one, or a model's own table."""
        match function:
            case ast.Call(ast.Attribute(_, name), [], []):
                return name == GETTER
            case ast.Attribute(holder, name):
                owner = self.owner if own_attribute(function) else self._class_of(holder)
                built = {build.target or "" for build in self.anatomy.builds(owner) if build.attribute == name}
                below = self.anatomy.classes.keys() & (built | self.anatomy.built_by(built))
                inside = [value for one in below for value in self.anatomy.classes[one].attributes.values()]
                return any(self.anatomy.is_a(value, TABLE) for value in (*self.anatomy.held(owner, name), *inside))
        return False

    def _class_of(self, holder: ast.expr) -> str:
        builds = (*self.anatomy.builds(self.owner), *self.anatomy.auto_builds(self.owner))
        targets = [self.anatomy.target_of(build) for build in builds if build.attribute == own_attribute(holder)]
        return next(filter(None, targets), "")


class Counts(Flow):
    """Finds whether a model looks up in a table what it counts itself."""

    COUNTED = "counted"
    found = False

    def __init__(self, anatomy: Anatomy, owner: str, running: tuple[FunctionNode, ...] = ()) -> None:
        super().__init__(anatomy, owner, running)
        self.kept: dict[str, Marks] = {}  # attribute -> the marks of what the methods run so far set it to

    def attribute(self, name: str) -> Marks:
        if name not in dict(made_buffers(self.anatomy, self.owner)):
            return NONE
        maker = Counts(self.anatomy, self.owner, self._running)
        for info in reversed([*self.anatomy.lineage(self.owner)]):  # a class sets its own values last
            if "__init__" in info.methods and info.methods["__init__"] not in self._running:
                maker.run(info.methods["__init__"])
        return maker.kept.get(name, NONE) & {self.COUNTED}

    def operation(self, name: str, operands: Sequence[Marks]) -> Marks | None:
        if name == "forward":  # `super().forward` in a class that is itself a table
            self._look_up(ast.Name(self.owner, ast.Load()), operands)
        return frozenset({self.COUNTED}) if name in COUNTS else None

    def module(self, name: str, call: ast.Call, operands: Sequence[Marks]) -> Marks:
        self._look_up(self.anatomy.attribute(self.owner, name), operands)
        given = arguments(call, ("name", "tensor")).get("name")
        if name == "register_buffer" and isinstance(given, ast.Constant):
            self.kept[str(given.value)] = NONE.union(*operands)
        for build in self.anatomy.builds(self.owner):
            method = self.anatomy.method(build.target or "", "forward") if build.attribute == name else None
            if method is not None and method[1] not in self._running:
                inner = Counts(self.anatomy, build.target or "", self._running)
                inner.run(method[1], handed(call, operands, method[1]))
                self.found |= inner.found
        return super().module(name, call, operands)

    def _bind(self, target: ast.expr, marks: Marks, adds: bool = False) -> Marks:
        if attribute := own_attribute(target):
            self.kept[attribute] = marks
        return super()._bind(target, marks, adds)

    def _look_up(self, table: ast.AST | None, operands: Sequence[Marks]) -> None:
        self.found |= self.anatomy.is_a(table, TABLE) and self.COUNTED in NONE.union(*operands)


def entered(
    anatomy: Anatomy, owner: str, names: Sequence[str], method: str, statements: Sequence[ast.stmt]
) -> list[str]:
    """Those of these names that the features from `self.<method>` may be put into: the names that the statements, from the
    call on, read; of several, those that hold features below them."""
    read = {*loaded(*statements)}
    read_names = [name for name in names if name in read]
    if len(read_names) < 2:
        return read_names
    holding = Sources(anatomy, owner, method).names(statements)
    return [name for name in read_names if name in holding]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds whichever of its branches runs."""
    if isinstance(statement, FunctionNode | ast.ClassDef):
        return  # binds names in a scope of its own
    if isinstance(statement, ast.If):
        body, orelse = ({n for s in branch for n in _bound(s)} for branch in (statement.body, statement.orelse))
        yield from body & orelse
    else:
        yield from stored(statement)
