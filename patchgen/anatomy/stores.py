"""Stores to attributes other than by `self.<attribute> = ...` in a method of the class.

    other.act = ...    setattr(other, "act", ...)    other.__dict__["act"] = ...    other.add_module("act", ...)

A computed name is represented by a pattern: `*_norm` for `f"{kind}_norm"`, `*` for any name.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from patchgen.anatomy.classes import (
    ClassInfo,
    arguments,
    is_setter,
    own_attribute,
    plain_assignments,
    stored,
    targets,
    walk,
)
from patchgen.anatomy.names import CONFIG, Names, is_of_config
from patchgen.source import bound_names

# (class, attribute): the class where the store is to its `self`, `config` for an item of a config, "" for any other object; the
# attribute or its pattern.
Store = tuple[str, str]
ANY = "*"
TABLES = ("__dict__", "_modules", "_parameters", "_buffers")  # where Python and torch keep attributes
UPDATES = ("update", "setdefault", "__setitem__")
# Methods whose first parameter is the name of an attribute -> that parameter's name.
SETTERS = {
    "__setattr__": "name",
    "add_module": "name",
    "register_module": "name",
    "register_buffer": "name",
    "register_parameter": "name",
    "set_submodule": "target",
}


def stores_of_class(info: ClassInfo, names: Names) -> Iterator[Store]:
    """The stores by the methods and the body of a class; setters (`is_setter`) are left out."""
    for method in info.methods.values():
        if not is_setter(method):
            yield from stores_in(method, info.name, names)
    for statement in info.node.body:
        if isinstance(statement, ast.Assign):
            yield from (("", name) for name in bound_names(statement))
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            yield from ((info.name, name) for name in bound_names(statement))


def stores_in(code: ast.AST, owner: str, names: Names) -> Iterator[Store]:
    """The stores in code; `owner` is the class of its `self`, "" for a function, whose `self` may be anything."""
    nodes, bound = walk(code), stored(code)
    texts = {name: value for name, value in plain_assignments(nodes).items() if bound.count(name) == 1}
    assigned = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    plain = {node for statement in assigned for target in targets(statement) for node in walk(target)}
    for node in nodes:
        if owner and own_attribute(node) and node in plain and own_attribute(node) not in TABLES:
            continue  # `stores_of` finds it
        for holder, name in _stored(node, names):
            is_own = isinstance(holder, ast.Name) and holder.id == "self"
            yield owner if is_own else "", _pattern(name, texts).rpartition(".")[2]
        yield from ((CONFIG, name) for name in _stored_in_config(node))


def _stored(node: ast.AST, names: Names) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """(object, name) of each attribute that a node stores; None for any name."""
    match node:
        case ast.Attribute(holder, name, ast.Store() | ast.Del()):
            yield holder, None if name in TABLES else ast.Constant(name)
        case ast.Subscript(table, key, ast.Store()) if holder := _holder(table, names):
            yield holder, key
        case ast.Assign(value=table) if holder := _holder(table, names):
            yield holder, None  # an alias of the table
        case ast.Call(ast.Attribute(table, method)) if method in UPDATES and (holder := _holder(table, names)):
            yield holder, None
        case ast.Call(ast.Attribute(holder, setter)) if setter in SETTERS:
            yield _set_by(node, holder, SETTERS[setter], names)
        case ast.Call(function, [holder, name, *_]) if names.resolve(function) == "builtins.setattr":
            yield holder, name


def _stored_in_config(node: ast.AST) -> Iterable[str]:
    """What a piece of code stores as items: of a part of a config, that part; of the config, what a dict of names holds."""
    match node:
        case ast.Subscript(holder, _, ast.Store()) if is_of_config(holder):
            given = None
        case ast.Call(ast.Attribute(holder, method), given) if method in UPDATES and is_of_config(holder):
            given = None if node.keywords else given
        case _:
            return ()
    match holder, given:
        case ast.Attribute(_, name), _ if own_attribute(holder) != CONFIG:
            return [name]
        case _, [ast.Dict(keys)]:
            return [_pattern(key, {}) for key in keys]
    return [ANY]


def _set_by(call: ast.Call, holder: ast.expr, parameter: str, names: Names) -> tuple[ast.AST, ast.AST | None]:
    """(object, name) of `other.add_module(name, ...)`, `super().add_module(name, ...)` and
    `nn.Module.add_module(other, name, ...)`."""
    match holder:
        case ast.Call(ast.Name("super"), []):
            holder = ast.Name("self", ast.Load())
        case _ if names.resolve(holder):  # a class: its method takes the instance first
            given = arguments(call, ("self", parameter))
            return given.get("self", holder), given.get(parameter)
    return holder, arguments(call, (parameter,)).get(parameter)


def _holder(table: ast.AST, names: Names) -> ast.expr | None:
    """The object whose attributes a table holds: `other` for `other.__dict__` and `vars(other)`."""
    match table:
        case ast.Attribute(holder, name) if name in TABLES:
            return holder
        case ast.Call(function, [holder]) if names.resolve(function) == "builtins.vars":
            return holder
    return None


def _pattern(name: ast.AST | None, texts: Mapping[str, ast.expr]) -> str:
    """The attribute's name, with `*` for computed parts; `texts` has the values of local names that are assigned once."""
    match name:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(_pattern(part, {}) for part in parts)
        case ast.BinOp(left, ast.Add(), right):
            return _pattern(left, texts) + _pattern(right, texts)
        case ast.Name(local) if isinstance(value := texts.get(local), ast.Constant):
            return _pattern(value, {})
    return ANY
