"""What a forward keeps of its data in attributes of `self` for the next call: on several ranks, each keeps its own."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TypeGuard

from patchgen.anatomy import known
from patchgen.anatomy.assignments import SHARING, value_pairs, values_in
from patchgen.anatomy.classes import (
    FunctionNode,
    all_arguments,
    arguments,
    calls,
    defaults_of,
    is_in_place,
    loaded,
    own_attribute,
    parameter_names,
    parameters,
    stored,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import Names, is_of_config

CASTS = ("to", "float", "double", "half", "bfloat16", "type_as")
BODIES = ast.stmt | ast.ExceptHandler | ast.match_case
DEFAULT = re.compile(r"(\w+) = \1 if \1 is not None else self\.config(\.\w+)+")


class StateChanges:
    """Finds the statements that store values computed from this call's data in attributes of `self` for the next call.

    These are changes in place (`self.load += ...`, `self.load[i] = ...`, `self.load.add_(...)`, `out=self.load`), a new
    value of a buffer that checkpoints keep (others may hold positions, for example), a value computed from the old one
    (`self.load = self.load + ...`), and one that is kept from the first call (`if self.scale is None: self.scale = ...`), also by
    `setattr`; in the forward and in what it calls in the file. Not found: an old value that is read through a local name, lists
    and other containers, globals; a first call that another attribute or an early return tells.
    """

    def __init__(self, anatomy: Anatomy, owner: str) -> None:
        self._anatomy, self._owner, self._names = anatomy, owner, anatomy.names
        self._buffers = known.buffers(anatomy, owner)
        self._running: list[FunctionNode] = []

    def of(self, function: FunctionNode, data: set[str], aliases: dict[str, str]) -> Iterator[str]:
        """Yields the source of each such statement of a function, and of what it calls in the file; `data` are the parameters
        that hold data of this call, `aliases` those that hold an attribute of `self`, with its name."""
        if function in self._running:
            return
        self._running.append(function)
        derived, aliases, values_in = derived_from(self._names, function, data), dict(aliases), self._values_in
        renewed = set[str]()  # attributes that every call has assigned by now

        def reads(conditions: Iterable[ast.AST], *values: ast.AST) -> bool:
            is_chosen = conditions and (values_in(*conditions) - flags(function)) & derived
            return bool(is_chosen or values_in(*values) & derived)

        for statement, conditions in in_order(function.body):
            node = self._as_assignment(statement)
            parts = [part for part in ast.iter_child_nodes(node) if not isinstance(part, BODIES)]
            for target, value in value_pairs(node):
                is_changed = self._is_changed(node, target, aliases) or self._uses_old_value(target, value, renewed)
                is_kept = self._is_first(target, conditions) and own_attribute(target) not in renewed
                is_kept = is_kept and reads((), _uncast(value))
                if is_kept or (is_changed and reads(conditions, _uncast(value), *_indices(target))):
                    yield ast.unparse(statement)
                renewed |= {own_attribute(target)} if not conditions and isinstance(node, ast.Assign) else set()
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
                    attribute = _state_of(value, aliases)
                    aliases.pop(target.id, None)
                    if attribute and not values_in(*_indices(value)) & derived:
                        aliases[target.id] = attribute  # indexing by a tensor would copy
            for call in calls(*parts):
                called = self._anatomy.called(self._owner, call)
                changed = [_state_of(target, aliases) for target in _outputs(call, called is None)]
                is_changed = any(map(self._is_tensor, changed))
                if is_changed and reads(conditions, *all_arguments(call)):
                    yield ast.unparse(statement)
                if called is not None:
                    yield from self._of_called(called, call, derived, aliases)
        self._running.pop()

    def _values_in(self, *nodes: ast.AST) -> set[str]:
        return values_in(self._names, *nodes)

    def _as_assignment(self, node: ast.AST) -> ast.AST:
        """`self.load = value` for `setattr(self, "load", value)`; other statements as they are."""
        match node:
            case ast.Expr(ast.Call(setter, [ast.Name("self") as owner, ast.Constant(str(name)), value])):
                if self._names.resolve(setter) == "builtins.setattr":
                    return ast.Assign([ast.Attribute(owner, name, ast.Store())], value)
        return node

    def _of_called(
        self, function: FunctionNode, call: ast.Call, derived: set[str], aliases: dict[str, str]
    ) -> Iterator[str]:
        names, values = parameter_names(function), all_arguments(call)
        given = {name: value for name, value in arguments(call, names).items() if name in names}
        if len(given) == len(values) and not any(isinstance(one, ast.Starred) for one in values):
            data = {name for name, value in given.items() if self._values_in(value) & derived}
        else:  # unknown which parameter gets which argument
            data = parameters(function) if self._values_in(*values) & derived else set[str]()
        held = {name: attribute for name, value in given.items() if (attribute := _state_of(value, aliases))}
        yield from self.of(function, data, held)

    def _is_changed(self, node: ast.AST, target: ast.expr, aliases: dict[str, str]) -> bool:
        """Whether an assignment changes an attribute in part or in place, or sets a buffer that checkpoints keep."""
        attribute = _state_of(target, aliases)
        if isinstance(node, ast.AugAssign) and isinstance(target, ast.Name):
            return self._is_tensor(attribute)
        is_part = isinstance(target, ast.Subscript) or (isinstance(target, ast.Attribute) and target.attr == "data")
        if isinstance(node, ast.AugAssign) or is_part:
            return bool(attribute)
        return self._buffers.get(own_attribute(target) or "", False)

    def _uses_old_value(self, target: ast.expr, value: ast.expr, renewed: Container[str]) -> bool:
        """Whether an attribute gets a value that the expression computes from its value of the call before."""
        attribute = own_attribute(target)
        if attribute is None or attribute in renewed:
            return False
        # As an argument of a function of the file it does not count: that may extend a table, which depends on sizes alone.
        elsewhere = [node for call in calls(value) if self._anatomy.called(self._owner, call) for node in walk(call)]
        return any(own_attribute(node) == attribute and node not in elsewhere for node in walk(value))

    def _is_first(self, target: ast.expr, conditions: Iterable[ast.AST]) -> bool:
        """Whether an attribute is assigned only where there is none yet, as by `if self.scale is None`."""
        attribute = own_attribute(target)
        parts = [part for test in conditions for part in (test.values if _is_conjunction(test) else [test])]
        for part in parts:
            match part:
                case (
                    ast.Compare(asked, [ast.Is() | ast.Eq()], [ast.Constant(None)])
                    | ast.Compare(ast.Constant(None), [ast.Is() | ast.Eq()], [asked])
                    | ast.UnaryOp(ast.Not(), ast.Compare(asked, [ast.IsNot() | ast.NotEq()], [ast.Constant(None)]))
                    | ast.UnaryOp(ast.Not(), asked)
                ):
                    if attribute and self._asked_for(asked) == attribute:
                        return True
        return False

    def _asked_for(self, node: ast.expr) -> str | None:
        """`scale` for `self.scale`, `hasattr(self, "scale")` and `getattr(self, "scale", None)`."""
        match node:
            case ast.Call(function, [ast.Name("self"), ast.Constant(str(name)), *_]):
                return name if self._names.resolve(function) in ("builtins.hasattr", "builtins.getattr") else None
        return own_attribute(node)

    def _is_tensor(self, attribute: str | None) -> bool:
        """Whether an attribute may be a tensor: a change in place under another name changes it too."""
        return bool(attribute) and not known.is_number(self._anatomy, self._owner, attribute)


def _is_conjunction(test: ast.AST) -> TypeGuard[ast.BoolOp]:
    return isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)


def _outputs(call: ast.Call, is_library: bool) -> Iterator[ast.expr]:
    """The tensors that a call changes: the tensor of a method like `mul_`, and `out=` of a function of a library."""
    if isinstance(call.func, ast.Attribute) and is_in_place(call.func):
        yield call.func.value
    for keyword in call.keywords if is_library else ():
        if keyword.arg == "out":
            yield from keyword.value.elts if isinstance(keyword.value, ast.Tuple | ast.List) else [keyword.value]


def _state_of(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """`load` for `self.load` and what shares its memory: a part, `.data`, the result of an in-place method, an alias.

    None for anything else, the config too.
    """
    while own_attribute(node) is None or is_of_config(node):
        match node:
            case _ if is_of_config(node):
                return None
            case ast.Subscript(value) | ast.Attribute(value):
                node = value
            case ast.Call(ast.Attribute(value) as called) if is_in_place(called) or called.attr in SHARING:
                node = value
            case ast.Name(name):
                return aliases.get(name)
            case _:
                return None
    return own_attribute(node)


def in_order(
    body: Iterable[ast.AST], conditions: tuple[ast.AST, ...] = ()
) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """All statements in source order, nested ones too, each with the tests and iterables of the blocks that it is in, and the
    guards of the cases before its own."""
    for node in body:
        yield node, conditions
        if isinstance(node, ast.match_case) and node.guard is not None:
            conditions = (*conditions, ast.UnaryOp(ast.Not(), node.guard))
        asked = [getattr(node, name) for name in ("test", "iter", "subject", "guard") if getattr(node, name, None)]
        otherwise = node.orelse if isinstance(node, ast.If) else []
        inside = [part for part in ast.iter_child_nodes(node) if isinstance(part, BODIES) and part not in otherwise]
        yield from in_order(inside, (*conditions, *asked))
        yield from in_order(otherwise, (*conditions, *(ast.UnaryOp(ast.Not(), test) for test in asked)))


def derived_from(names: Names, function: FunctionNode, data: set[str]) -> set[str]:
    """`data`, and the names and attributes (`self.load`) of a function whose values are computed from it."""
    pairs = [pair for node in walk(function) for pair in value_pairs(node)]
    derived, before = set(data), -1
    while before < len(derived):
        before = len(derived)
        for target, value in pairs:
            if derived & values_in(names, _uncast(value)):
                attribute = own_attribute(target)
                derived |= {f"self.{attribute}"} if attribute else set(stored(target))
    return derived


def _uncast(value: ast.expr) -> ast.expr:
    """A value without its casts."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in CASTS:
        value = value.func.value
    return value


def _indices(target: ast.expr) -> Iterator[ast.expr]:
    return (node.slice for node in walk(target) if isinstance(node, ast.Subscript))


def flags(forward: FunctionNode) -> set[str]:
    """The parameters, and expressions `kwargs.get("wanted", False)`, that may be bools and are never reassigned, except for a
    default of the config (`DEFAULT`)."""
    kept = [n for n in walk(forward) if isinstance(n, ast.Assign) and DEFAULT.fullmatch(ast.unparse(n))]
    flags, bound = _bools(forward, kept), stored(forward)
    flags = {name for name in flags if bound.count(name) == sum(name in stored(node) for node in kept)}
    return flags | _asked_flags(forward)


def _bools(forward: FunctionNode, kept: Sequence[ast.AST]) -> set[str]:
    """The parameters annotated as a bool; of those without annotation the ones whose default is a bool, or is None and whose
    value is only tested or passed on."""
    args, defaults = forward.args, defaults_of(forward)
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    bools = {arg.arg for arg in named if arg.annotation and "bool" in ast.unparse(arg.annotation)}
    asked = _asked(forward, kept)
    reads = [node for node in walk(forward) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    for name in [arg.arg for arg in named if arg.annotation is None and arg.arg in defaults]:
        default = defaults[name]
        value = default.value if isinstance(default, ast.Constant) else ...
        is_asked = value is None and all(node in asked for node in reads if node.id == name)
        bools |= {name} if isinstance(value, bool) or is_asked else set()
    return bools


def _asked(forward: FunctionNode, kept: Sequence[ast.AST]) -> set[ast.AST]:
    """The expressions that are only tested for truth or None, passed on as arguments outside a condition, or in `kept`."""
    conditions = [n.test for n in walk(forward) if isinstance(n, ast.If | ast.IfExp | ast.While)]
    inside = {part for condition in conditions for part in walk(condition)}
    asked = {part for node in kept for part in walk(node)} | {*conditions}
    for node in walk(forward):
        match node:
            case ast.BoolOp(values=parts):
                asked |= {*parts}
            case ast.UnaryOp(ast.Not(), part) | ast.Compare(part, [ast.Is() | ast.IsNot()]):
                asked.add(part)
            case ast.Call(_, args, keywords) if node not in inside:
                asked |= {*args, *(keyword.value for keyword in keywords)}
    return asked


def _asked_flags(forward: FunctionNode) -> set[str]:
    """The `kwargs.get(name, default)` of a forward with a bool for a default; empty if it does anything else with its kwargs
    than such calls and passing them on."""
    kwargs = forward.args.kwarg.arg if forward.args.kwarg else ""
    asked = [n for n in walk(forward) if isinstance(n, ast.Call) and ast.unparse(n.func) == f"{kwargs}.get"]
    named = [n for n in walk(forward) if isinstance(n, ast.keyword) and n.arg is None]
    handed_on = [n for n in named if isinstance(n.value, ast.Name) and n.value.id == kwargs]
    if [*loaded(forward), *stored(forward)].count(kwargs) != len(asked) + len(handed_on):
        return set()
    defaults = {call: call.args[1] for call in asked if len(call.args) == 2}
    return {ast.unparse(call) for call, default in defaults.items() if ast.unparse(default) in ("True", "False")}
