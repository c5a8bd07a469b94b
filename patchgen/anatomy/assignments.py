"""What statements assign and change: pairs of target and value, the values that code reads, and what a function makes of them."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Container, Iterator

from patchgen.anatomy.classes import (
    FunctionNode,
    all_arguments,
    base_name,
    is_in_place,
    own_attribute,
    targets,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import Names

# Attributes and methods that tell what a tensor looks like, not its values.
ASKED, ASKED_BY_CALL = ("device", "dtype", "shape"), ("size", "dim", "numel", "get_device")
SHARING = ("detach", "view", "view_as", "squeeze", "unsqueeze")  # methods whose result shares the tensor's memory
VIEWS = (*SHARING, "reshape", "flatten", "transpose", "permute", "select", "narrow")  # may share memory
ADDING = ("append", "extend", "insert")  # to a list


def value_pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment or loop; of a tuple of targets each with its element, or else with the whole value."""

    def parts(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
        if not isinstance(target, ast.Tuple | ast.List):
            yield target, value
            return
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        is_starred = any(isinstance(part, ast.Starred) for part in (*values, *target.elts))
        is_alike = len(values) == len(target.elts) and not is_starred
        for place, one in enumerate(target.elts):
            yield from parts(one, values[place] if is_alike else value)

    match node:
        case ast.Assign() | ast.AnnAssign(value=ast.expr()) | ast.AugAssign() | ast.NamedExpr():
            assert node.value is not None
            for target in targets(node):
                yield from parts(target, node.value)
        case ast.For(target, value):
            yield from parts(target, value)


def values_in(names: Names, *nodes: ast.AST) -> set[str]:
    """The names and attributes (`self.load`) whose values code reads, rather than only shape, dtype or whether it is None."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if name in ASKED:
                continue
            case ast.Call(ast.Attribute(attr=name)) if name in ASKED_BY_CALL:
                continue
            case ast.Call(function) if names.resolve(function) == "builtins.len":
                continue
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                continue
            case ast.Name(name):
                found.add(name)
            case ast.Attribute() if attribute := own_attribute(node):
                found.add(f"self.{attribute}")
            case _:
                found |= values_in(names, *ast.iter_child_nodes(node))
    return found


def values_used(*code: ast.AST) -> set[str]:
    """The names, and attributes of `self`, whose values or sizes code uses, rather than only their device, their dtype or
    whether they are None."""
    not_read: list[ast.expr] = []
    for node in (node for part in code for node in walk(part)):
        match node:
            case ast.Attribute(value, "device" | "dtype") | ast.Compare(value, [ast.Is() | ast.IsNot()]):
                not_read.append(value)
    return _names(ast.Load, *code, without=not_read)


def made_of(anatomy: Anatomy, function: FunctionNode, sources: set[str]) -> set[str]:
    """`sources`, and the names and attributes of `self` that a function computes from their values, also those that it writes to
    in part or in place."""
    made, before = {*sources}, -1
    while before < len(made):
        before = len(made)
        for node in walk(function):
            pairs = [(node.target, node.iter)] if isinstance(node, ast.comprehension) else value_pairs(node)
            for target, value in pairs:
                written = _names(ast.Store, target) | {base_name(target)} - {"", "self"}
                made |= written if made & values_used(value) else set()
            for part, values in _changes(anatomy, node):
                made |= {_holder(part)} - {""} if made & values_used(*values) else set()
    return made


def _changes(anatomy: Anatomy, node: ast.AST) -> Iterator[tuple[ast.expr, list[ast.expr]]]:
    """What code changes in part or in place, and of which values."""
    for target, value in value_pairs(node):
        if isinstance(target, ast.Subscript):
            yield target, [value]
    if isinstance(node, ast.Expr):  # `cache.put(x)`: nothing takes its result, it is run for what it changes
        match node.value:
            case ast.Call(ast.Attribute(holder)) if anatomy.names.resolve(holder) is None:
                yield holder, all_arguments(node.value)
    if not isinstance(node, ast.Call):
        return
    values = all_arguments(node)
    match node:
        case ast.Call(ast.Attribute(holder) as called, args) if is_in_place(called):
            is_function = anatomy.names.resolve(called) and args  # `torch.relu_(h)`
            yield args[0] if is_function else holder, values
        case ast.Call(ast.Attribute(holder, method)) if method in ADDING:
            yield holder, values
    for keyword in node.keywords:
        if keyword.arg == "out":
            yield from ((part, node.args) for part in getattr(keyword.value, "elts", [keyword.value]))


def _holder(node: ast.expr) -> str:
    """The name of what holds `h[i][0]`, or shares its memory."""
    while not _name(node):
        match node:
            case ast.Subscript(value) | ast.Attribute(value):
                node = value
            case ast.Call(ast.Attribute(value, method) as called) if is_in_place(called) or method in VIEWS:
                node = value
            case _:
                break
    return _name(node)


def _name(node: ast.AST) -> str:
    """`h` and `self.h`; "" for other code."""
    if isinstance(node, ast.Name):
        return node.id if node.id != "self" else ""
    attribute = own_attribute(node)
    return f"self.{attribute}" if attribute else ""


def _names(context: type[ast.expr_context], *code: ast.AST, without: Container[ast.AST] = ()) -> set[str]:
    """The names, and attributes of `self`, that code reads or binds."""
    nodes = (node for part in code for node in walk(part) if node not in without)
    return {_name(node) for node in nodes if isinstance(getattr(node, "ctx", None), context)} - {""}
