"""Where a file builds its classes, and the arguments that it passes to their `__init__`."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchgen.anatomy.classes import (
    FunctionNode,
    calls,
    constructed,
    handed_to,
    own_attribute,
    parameter_names,
    stored,
    stores_of,
    walk,
)
from patchgen.anatomy.names import CONFIG

if TYPE_CHECKING:
    from patchgen.anatomy.graph import Anatomy


@dataclass(frozen=True)
class Place:
    """Where code is: its class, "" outside of classes, and its function, None outside of functions."""

    owner: str
    function: FunctionNode | None


class Constructions:
    """The constructions in one file.

    Attributes:
        scopes: the place of each name that is read or bound in a function.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        self.scopes: dict[ast.AST, Place] = {}
        self._built: dict[str, list[tuple[Place, ast.Call]]] = {}
        for place, code in self._code():
            if place.function is not None:
                self.scopes |= dict.fromkeys((node for node in walk(code) if isinstance(node, ast.Name)), place)
            for call in calls(code):
                for name in self._classes_of(constructed(call)):
                    self._built.setdefault(name, []).append((place, call))

    def _code(self) -> Iterator[tuple[Place, ast.AST]]:
        """All code of the file except the bases and decorators of classes."""
        seen = set[ast.AST]()
        for info in self._anatomy.classes.values():
            for node in info.node.body:
                method = node if isinstance(node, FunctionNode) and info.methods.get(node.name) is node else None
                yield Place(info.name, method), node
                seen |= {*walk(node)}
            for value in info.attributes.values():  # rewritten by a pass since
                if value not in seen:
                    yield Place(info.name, None), value
        for node in self._anatomy.names.outside_classes:
            yield Place("", node if isinstance(node, FunctionNode) else None), node

    def _classes_of(self, built: ast.expr) -> set[str]:
        """The classes of the file that a call builds, by their names or from a table of the module."""
        anatomy, named = self._anatomy, [built]
        match built:
            case ast.Subscript(ast.Name(name)) if isinstance(table := anatomy.tables.get(name), ast.Dict):
                named = table.values
        return {*map(anatomy.names.here, named)} & anatomy.classes.keys()

    def given(
        self, init: FunctionNode, parameter: str, owners: Iterable[str]
    ) -> Iterator[tuple[Place, ast.expr | None]]:
        """The arguments for a parameter of an `__init__` that instances of these classes run, each with its place: in calls of
        the classes, and in subclasses that call the `__init__` of a base. None: no argument."""
        anatomy, names, visited = self._anatomy, parameter_names(init), set[ast.AST]()
        for owner in owners:
            chain = [info for info in anatomy.lineage(owner) if "__init__" in info.methods]
            place = next((i for i, info in enumerate(chain) if info.methods["__init__"] is init), None)
            if place == 0:
                for where, call in self._built.get(owner, ()):
                    yield where, handed_to(call, names, parameter)
            for heir in chain[: place or 0]:
                where = Place(heir.name, heir.methods["__init__"])
                for call in calls(heir.methods["__init__"]):
                    if call not in visited and (first := self._runs(init, call, owner, heir.name)) is not None:
                        visited.add(call)
                        yield where, handed_to(call, [*first, *names], parameter)

    def _runs(self, init: FunctionNode, call: ast.Call, owner: str, heir: str) -> list[str] | None:
        """Whether a call in an `__init__` of a class runs this `__init__` of a base for an instance of `owner`: the names of
        what it takes before its parameters. None: it does not."""
        anatomy = self._anatomy
        match call.func:
            case ast.Attribute(ast.Call(ast.Name("super"), args), "__init__"):
                start = anatomy.names.resolve(args[0]) if args else f".{heir}"
                lineage = [*anatomy.lineage(owner)]
                places = [i for i, info in enumerate(lineage) if start == f".{info.name}"] or range(len(lineage))
                after = (lineage[i + 1 :] for i in places)
                run = [[info.methods["__init__"] for info in infos if "__init__" in info.methods] for infos in after]
                return [] if any(inits[:1] == [init] for inits in run) else None
            case ast.Attribute(base, "__init__"):
                run = anatomy.method(anatomy.names.here(base), "__init__")
                return ["self"] if run and run[1] is init else None
        return None

    def is_whole_config(self, place: Place, given: ast.AST | None) -> bool:
        """Whether an argument at a place is the config that the class there was itself built with: its `__init__` binds the name
        once, as its parameter; or it is `self.config`, and neither code of the class nor a base's `__init__` gets another."""
        if isinstance(given, ast.Name):
            init = place.function if place.function and place.function.name == "__init__" else None
            if init is None or given.id != CONFIG or CONFIG not in parameter_names(init):
                return False
            return CONFIG not in stored(init)
        if given is None or own_attribute(given) != CONFIG:
            return False
        family = self._anatomy.family(place.owner)
        inits = [info.methods["__init__"] for info in family if "__init__" in info.methods]
        kept = [value for info in family for value in stores_of(info, CONFIG)]
        handed = (handed_to(call, [CONFIG], CONFIG) for init in inits for call in calls(init) if _is_init(call.func))
        kept += [value for value in handed if value is not None]
        return all(isinstance(value, ast.Name) and self.is_whole_config(self.scopes[value], value) for value in kept)


def _is_init(called: ast.AST) -> bool:
    return isinstance(called, ast.Attribute) and called.attr == "__init__"
