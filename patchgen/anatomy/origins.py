"""Where a value, for example a size, comes from: traced through attributes, parameters of `__init__` and names."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterator

from patchgen.anatomy.classes import (
    assigned_to,
    defaults_of,
    is_shadowed,
    own_attribute,
    parameter_names,
    parameters,
    stored,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import CONFIG

SEQUENCES = (ast.Tuple, ast.List)


def origins(
    anatomy: Anatomy, owner: str, value: ast.AST, visited: frozenset[tuple[str, str]] = frozenset()
) -> Iterator[tuple[str, ast.AST]]:
    """The expressions that a value in the code of class `owner` may come from, each with the class whose code it is in.

    Names and attributes are followed to what they hold. A name or attribute of which the file says nothing, for example an
    attribute of a config, is its own origin.
    """
    inner: list[tuple[str, ast.AST]] = []
    match value:
        case ast.NamedExpr():
            inner = [(owner, value.value)]
        case ast.IfExp():
            inner = [(owner, value.body), (owner, value.orelse)]
        case ast.BoolOp():
            inner = [(owner, part) for part in value.values]
        case ast.Attribute() if attribute := own_attribute(value):
            inner = [(owner, held) for held in anatomy.held(owner, attribute)]
        case ast.Attribute():
            inner = [(owner, handed) for handed in anatomy.handed(owner, value)]
        case ast.Name():
            inner = _named(anatomy, value)
    place = (owner, ast.unparse(value))
    if not inner or place in visited:
        yield owner, value
        return
    for of, part in inner:
        yield from origins(anatomy, of, part, visited | {place})


def _named(anatomy: Anatomy, name: ast.Name) -> list[tuple[str, ast.AST]]:
    """What a name may hold, each with the class whose code it is in; empty if that is not known."""
    place = anatomy.constructions.scopes.get(name)
    function = place.function if place else None
    is_parameter = function is not None and name.id in parameter_names(function)
    values: list[tuple[str, ast.AST]] = []
    if place and function and name.id in stored(function):
        assigned = assigned_to(function, name.id)
        if assigned is None:
            return []
        values = [(place.owner, value) for value in assigned]
    if function and is_parameter:
        if function.name != "__init__" or is_shadowed(function, name.id):
            return []
        builds = [*anatomy.constructions.given(function, name.id, anatomy.classes)]
        values += [(where.owner, given) for where, given in builds if given is not None]
        default = defaults_of(function).get(name.id)
        if default is not None and (not builds or any(given is None for _, given in builds)):
            values.append((place.owner if place else "", default))
        return values
    is_of_module = anatomy.names.resolve(name) == f".{name.id}" and len(anatomy.names.statements.get(name.id, ())) == 1
    if not values and is_of_module and name.id in anatomy.tables:
        return [("", anatomy.tables[name.id])]
    return values


def is_fixed(anatomy: Anatomy, owner: str, size: ast.AST, visited: frozenset[ast.AST] = frozenset()) -> bool:
    """Whether a size may be a constant of the source, or several sizes, rather than one that a caller or config chooses; a size
    of which nothing is known may be. `size = size * 2` is not followed into itself: it is in `visited`."""
    for of, origin in origins(anatomy, owner, size):
        match origin:
            case ast.Constant(None):
                continue
            case ast.BinOp(left, _, right):
                parts = [left, right]
            case ast.UnaryOp(_, operand):
                parts = [operand]
            case ast.Call(_, [_, *_] as parts):
                pass
            case _:
                parts = []
        known = visited | {origin}
        if isinstance(origin, (ast.Constant, ast.Starred, *SEQUENCES)) or _is_of_other_function(anatomy, origin):
            return True
        if parts and origin not in visited and all(is_fixed(anatomy, of, part, known) for part in parts):
            return True
    return False


def _is_of_other_function(anatomy: Anatomy, origin: ast.AST) -> bool:
    """Whether it is a parameter of another function than an `__init__`, or an attribute of one that is no config: what that
    is called with is not read."""
    base = origin.value if isinstance(origin, ast.Attribute) else origin
    place = anatomy.constructions.scopes.get(base)
    function = place.function if place else None
    if function is None or function.name == "__init__":
        return False
    return isinstance(base, ast.Name) and base.id in parameters(function) - {CONFIG}
