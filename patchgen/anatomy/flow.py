"""Data flow: marks say what a value is computed from, and pass from parameters through assignments and calls.

Each subclass of `Flow` (`Sources`, `Attention`, `Rotary`, `Embedder`) defines which marks operations add. Branches are joined, loop
bodies run twice, functions and methods of the file are followed; the result of an operation that the subclass does not know
has the marks of its operands.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from patchgen.anatomy.classes import (
    FunctionNode,
    all_arguments,
    base_name,
    calls,
    loaded,
    own_attribute,
    parameter_names,
    parameters,
    stored,
    targets,
    walk,
)
from patchgen.anatomy.known import made_buffers

if TYPE_CHECKING:
    from patchgen.anatomy.graph import Anatomy

Marks = frozenset[str]
NONE: Marks = frozenset()
DATA = "data"  # computed from the function's arguments, or by a module
CONVOLUTIONS = ("torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")
LINEAR = "torch.nn.Linear"
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
EXPONENTIALS = {"softmax", "log_softmax", "logsumexp", "exp", "exp2"}  # a softmax, or part of a written-out one


class Flow:
    """Runs a method of `owner` on marks instead of values."""

    def __init__(self, anatomy: Anatomy, owner: str, running: tuple[FunctionNode, ...] = ()) -> None:
        self.anatomy, self.owner = anatomy, owner
        self.values: dict[str, Marks] = {}
        self._running = running

    def run(self, function: FunctionNode, given: Mapping[str, Marks] | None = None) -> Marks:
        """The marks of a function's result; `given` has those of its arguments, and without it all of them are data."""
        if given is None:
            given = dict.fromkeys(parameters(function), frozenset({DATA}))
        around, running = self.values, self._running
        self.values, self._running = dict(given), (*running, function)
        result = self._statements(function.body)
        self.values, self._running = around, running
        return result

    def operation(self, name: str, operands: Sequence[Marks]) -> Marks | None:
        """The marks of the result of a torch function or tensor method, by its last name; None if it is not known."""

    def product(self, operands: Sequence[Marks]) -> Marks:
        return _joined(operands)

    def function(self, meaning: str, call: ast.Call) -> Marks:
        """The marks that a function which `operation` does not know adds to those of its arguments."""
        return NONE

    def attribute(self, name: str) -> Marks:
        """The marks of reading `self.<name>`."""
        return NONE

    def module(self, name: str, call: ast.Call, operands: Sequence[Marks]) -> Marks:
        """The marks of what the module `self.<name>` returns."""
        return _joined(operands) | {DATA}

    def built(self, name: str) -> tuple[str, FunctionNode] | None:
        """The class of this file that `self.<name>` is an instance of, and its forward; None if it is already running."""
        targets = {build.target for build in self.anatomy.builds(self.owner) if build.attribute == name}
        target = targets.pop() or "" if len(targets) == 1 else ""
        method = self.anatomy.method(target, "forward")
        return (target, method[1]) if method is not None and method[1] not in self._running else None

    def returned(self, value: ast.expr) -> Marks:
        return self.value(value)

    def value(self, node: ast.AST | None) -> Marks:
        """The marks of an expression."""
        match node:
            case ast.Name(name, ast.Load()):
                return self.values.get(name, NONE)
            case ast.Attribute(owner, name):
                return self.attribute(name) if own_attribute(node) else self.value(owner)
            case ast.NamedExpr(target, value):
                return self._bind(target, self.value(value))
            case ast.BinOp(left, ast.MatMult(), right):
                return self.product([self.value(left), self.value(right)])
            case ast.Call():
                return self._call(node)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                for part in node.generators:
                    self._bind(part.target, self.value(part.iter))
        return _joined(map(self.value, ast.iter_child_nodes(node))) if node is not None else NONE

    def _call(self, call: ast.Call) -> Marks:
        function, name = call.func, self.anatomy.names.operation(call)
        attribute, callee = own_attribute(function), self.anatomy.called(self.owner, call)
        operands = [*map(self.value, all_arguments(call))]
        if callee is not None and callee not in self._running:
            return self.run(callee, handed(call, operands, callee))
        if attribute is not None:
            return self.module(attribute, call, operands)
        meaning = self.anatomy.names.resolve(function) or ""
        if not meaning and isinstance(function, ast.Attribute):  # a method of a tensor
            operands.insert(0, self.value(function.value))
        known = self.operation(name, operands) if name else None
        return _joined(operands) | self.function(meaning, call) if known is None else known

    def _statements(self, body: Iterable[ast.stmt]) -> Marks:
        return _joined([self._statement(statement) for statement in body])

    def _statement(self, node: ast.stmt) -> Marks:
        match node:
            case ast.Assign(value=value) | ast.AugAssign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                self._assign(node, value)
            case ast.Return(value) if value is not None:
                return self.returned(value)
            case ast.Expr(value):
                marks = self.value(value)
                if name := base_name(value):  # `x.add_(y)`
                    self.values[name] = self.values.get(name, NONE) | marks
            case ast.If(test, body, orelse):
                self.value(test)
                return self._branches(body, orelse)
            case ast.For() | ast.While():
                return self._loop(node)
            case ast.With(_, body):
                return self._statements(body)
            case ast.Try(body, handlers, orelse, finalbody):
                ways = [self._branches(body, handler.body) for handler in handlers] or [self._statements(body)]
                return _joined(ways) | self._statements([*orelse, *finalbody])
            case ast.Match(subject, cases):
                self.value(subject)
                return _joined([self._branches(case.body, []) for case in cases])
            case ast.FunctionDef(body=body):  # run at its definition, on any data
                self.values |= dict.fromkeys(parameter_names(node), frozenset({DATA}))
                return self._statements(body)
        return NONE

    def _branches(self, body: list[ast.stmt], orelse: list[ast.stmt]) -> Marks:
        """The marks of what either branch returns; below them, a name has the marks of both."""
        before = dict(self.values)
        result = self._statements(body)
        after, self.values = self.values, before
        result |= self._statements(orelse)
        self.values = {name: after.get(name, NONE) | self.values.get(name, NONE) for name in {*after, *self.values}}
        return result

    def _loop(self, loop: ast.For | ast.While) -> Marks:
        if isinstance(loop, ast.For):
            self._bind(loop.target, self.value(loop.iter))
        return self._branches(loop.body * 2, [])

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, value: ast.expr) -> None:
        for target in targets(node):
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                element_marks = list(map(self.value, value.elts))
                for part, marks in zip(target.elts, element_marks, strict=True):
                    self._bind(part, marks)
            else:
                self._bind(target, self.value(value), adds=isinstance(node, ast.AugAssign))

    def _bind(self, target: ast.expr, marks: Marks, adds: bool = False) -> Marks:
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._bind(part, marks)
        elif name := base_name(target):
            known = self.values.get(name, NONE) if adds or not isinstance(target, ast.Name) else NONE
            self.values[name] = known | marks
        return marks


def handed(call: ast.Call, operands: Sequence[Marks], function: FunctionNode) -> dict[str, Marks]:
    """Parameter -> the marks of its argument in a call, the function's `*args` and `**kwargs` included. `operands` are the
    marks of the call's arguments, in order. A starred argument may be for any parameter without another argument."""
    parameters, names = function.args, parameter_names(function)
    plain = names[: len(names) - len(parameters.kwonlyargs)]
    place = next((i for i, arg in enumerate(call.args) if isinstance(arg, ast.Starred)), len(call.args))
    named = [(keyword.arg, marks) for keyword, marks in zip(call.keywords, operands[len(call.args) :], strict=True)]
    spread = _joined([*operands[place : len(call.args)], *(marks for name, marks in named if name is None)])
    known = dict(zip(plain, operands[:place], strict=False)) | {name: marks for name, marks in named if name in names}
    given = {name: known.get(name, spread) for name in names}
    if parameters.vararg:
        given[parameters.vararg.arg] = _joined([spread, *operands[len(plain) : place]])
    if parameters.kwarg:
        given[parameters.kwarg.arg] = _joined([spread, *(marks for name, marks in named if name not in names)])
    return given


def _joined(parts: Iterable[Marks]) -> Marks:
    return NONE.union(*parts)


class Sources(Flow):
    """Finds the names that hold what is computed from others, or from the result of a method of the class."""

    MADE: Marks = frozenset({"made"})

    def __init__(self, anatomy: Anatomy, owner: str, method: str = "") -> None:
        super().__init__(anatomy, owner)
        self._method = method

    def names(self, statements: Iterable[ast.stmt], given: Iterable[str] = ()) -> set[str]:
        """The names that hold such values below the statements; `given` hold them above."""
        self.values = dict.fromkeys(given, self.MADE)
        self._statements(statements)
        return {name for name, marks in self.values.items() if marks & self.MADE}

    def value(self, node: ast.AST | None) -> Marks:
        match node:
            case ast.Attribute(_, "device" | "dtype") | ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return NONE
        return super().value(node)

    def _call(self, call: ast.Call) -> Marks:
        is_made = self._method and own_attribute(call.func) == self._method
        given = map(self.value, all_arguments(call))  # of a method of the file, too: by branches, if not by its result
        return super()._call(call).union(self.MADE if is_made else NONE, *given)


class Attention(Flow):
    """Finds softmax(q k) v: computed matrices are multiplied, and then the softmax of their product with a third."""

    SCORES, WEIGHTS = "scores", "weights"
    found = multiplies = False

    def operation(self, name: str, operands: Sequence[Marks]) -> Marks | None:
        if name in PRODUCTS:
            return self.product(operands)
        return self._softmax(operands) if name in EXPONENTIALS else None

    def _softmax(self, operands: Sequence[Marks]) -> Marks:
        marks = _joined(operands)
        return marks - {self.SCORES} | {self.WEIGHTS} if self.SCORES in marks else marks

    def product(self, operands: Sequence[Marks]) -> Marks:
        marks, computed = _joined(operands), [operand for operand in operands if DATA in operand]
        if len(computed) < 2:  # by a learned matrix: a linear map
            return marks
        self.multiplies = True
        self.found |= any(self.WEIGHTS in operand for operand in computed)
        return marks - {self.WEIGHTS} | {self.SCORES}

    def module(self, name: str, call: ast.Call, operands: Sequence[Marks]) -> Marks:
        if self.anatomy.is_a(self.anatomy.attribute(self.owner, name), "torch.nn.Softmax"):
            return self._softmax(operands)
        built = self.built(name)
        if built is None:
            return super().module(name, call, operands)
        # Scores do not pass between classes: hidden states that a layer is called with are none.
        computed = {name: marks & {DATA} for name, marks in handed(call, operands, built[1]).items()}
        key = (built[0], tuple(computed.values()))
        if key not in self.anatomy.attends:
            inner = Attention(self.anatomy, built[0], self._running)
            marks = inner.run(built[1], computed)
            self.anatomy.attends[key] = (NONE if inner.found else marks & {self.SCORES}), inner.multiplies
        marks, multiplies = self.anatomy.attends[key]
        weights = NONE if multiplies else _joined(operands) & {self.WEIGHTS}  # for example a dropout
        return marks | weights | {DATA}


class Rotary(Flow):
    """Finds cos and sin, as two tensors or one complex tensor, of arguments times frequencies that the class has in a buffer."""

    FREQUENCIES, COS, SIN, POLAR = "frequencies", "cos", "sin", "polar"
    found = False

    def __init__(self, anatomy: Anatomy, owner: str) -> None:
        super().__init__(anatomy, owner)
        buffers = [*made_buffers(anatomy, owner)]
        self._buffers, self._has_buffers = {name for name, _ in buffers}, bool(buffers)
        read = {*loaded(*(value for _, given in buffers for value in given.values()))} - {"self", "config"}
        nodes = (node for info in anatomy.lineage(owner) for node in walk(info.node))
        assigned = [node for node in nodes if isinstance(node, ast.Assign) and read & {*stored(node)}]
        self._makers = {own_attribute(call.func) for call in calls(*(node.value for node in assigned))}

    def _frequencies(self, is_read: bool) -> Marks:
        return frozenset({self.FREQUENCIES} if is_read else ())

    def attribute(self, name: str) -> Marks:
        return self._frequencies(name in self._buffers)

    def function(self, meaning: str, call: ast.Call) -> Marks:
        is_of_self = call.args and ast.unparse(call.args[0]) == "self"
        return self._frequencies(meaning == "builtins.getattr" and bool(is_of_self) and self._has_buffers)

    def operation(self, name: str, operands: Sequence[Marks]) -> Marks | None:
        if name in ("cos", "sin", "polar") and _joined(operands) >= {self.FREQUENCIES, DATA}:
            return frozenset({name})
        return None

    def module(self, name: str, call: ast.Call, operands: Sequence[Marks]) -> Marks:
        return _joined(operands) | self._frequencies(name in self._makers)

    def returned(self, value: ast.expr) -> Marks:
        parts = [self.value(part) for part in value.elts] if isinstance(value, ast.Tuple) else [self.value(value)]
        turns = [marks & {self.COS, self.SIN} for marks in parts]
        self.found |= frozenset({self.COS}) in turns and frozenset({self.SIN}) in turns
        self.found |= self.POLAR in _joined(parts)
        return _joined(parts)


class Embedder(Flow):
    """Finds the modules that apply a convolution or a linear map to the arguments, before the loop over the layers.

    Attributes:
        own: the attributes that hold a convolution or a linear layer, in the order of their calls.
        found: these, and the attributes with a module of this file that calls such modules.
    """

    def __init__(self, anatomy: Anatomy, owner: str, running: tuple[FunctionNode, ...] = ()) -> None:
        super().__init__(anatomy, owner, running)
        self.own: list[str] = []
        self.found: list[str] = []
        self._in_layers = False

    def module(self, name: str, call: ast.Call, operands: Sequence[Marks]) -> Marks:
        value = self.anatomy.attribute(self.owner, name)
        if DATA in _joined(operands) and value is not None and not self._in_layers:
            module_calls = calls(value) if self.anatomy.is_a(value, "torch.nn.Sequential") else (value,)
            is_own = any(self.anatomy.is_a(module_call, *CONVOLUTIONS, LINEAR) for module_call in module_calls)
            self.own += [name] * is_own
            self.found += [name] * (is_own or self._is_inside(name))
        return super().module(name, call, operands)

    def _is_inside(self, name: str) -> bool:
        built = self.built(name)
        inner = Embedder(self.anatomy, built[0] if built else "", self._running)
        if built is not None:
            inner.run(built[1])
        return bool(inner.found)

    def _loop(self, loop: ast.For | ast.While) -> Marks:
        called = {base_name(call.func) for call in calls(*loop.body)}
        self._in_layers |= isinstance(loop, ast.For) and bool(called & {*stored(loop.target)})
        return super()._loop(loop)
