"""Where a value, for example a size, comes from: traced through attributes, parameters of `__init__` and names."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterator

from patchgen.anatomy.classes import (
    assigned_to,
    defaults_of,
    own_attribute,
    parameter_names,
    stored,
)
from patchgen.anatomy.graph import Anatomy


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
        if function.name != "__init__":
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
