"""Where a file builds its classes, and the arguments that it passes to their `__init__`.

A class that is used other than by a call (as an entry of a table, under another name) may be built with any arguments there.
They are unknown, and recorded as `*Name`, which no reader takes for a value.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchgen.anatomy.classes import (
    FunctionNode,
    assigned_to,
    calls,
    constructed,
    defaults_of,
    handed_to,
    own_attribute,
    parameter_names,
    stored,
    walk,
)

if TYPE_CHECKING:
    from patchgen.anatomy.graph import Anatomy

ASKED = ("builtins.isinstance", "builtins.issubclass")  # calls that do not build the classes passed to them
RECORDED = "_can_record_outputs"  # transformers' table of classes whose outputs it records
LOADER = "from_pretrained"


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
        self._built: dict[str, list[tuple[Place, ast.expr]]] = {}
        for place, code in self._code():
            if place.function is not None:
                self.scopes |= dict.fromkeys((node for node in walk(code) if isinstance(node, ast.Name)), place)
            for name, expression in self._mentioned(place, code):
                self._built.setdefault(name, []).append((place, expression))

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
        others = {s for statements in self._anatomy.names.statements.values() for s in statements}
        for node in others:
            if not isinstance(node, ast.ClassDef):
                yield Place("", node if isinstance(node, FunctionNode) else None), node

    def _mentioned(self, place: Place, code: ast.AST) -> Iterator[tuple[str, ast.expr]]:
        """Each class that code may build: with its call, or with its name where it is used in another way."""
        if isinstance(code, ast.Assign | ast.AnnAssign) and RECORDED in stored(code):
            return
        resolve, classes = self._anatomy.names.resolve, self._anatomy.classes
        built = {constructed(call): call for call in calls(code)}
        passed = set[ast.AST]()
        for node in walk(code):
            match node:
                case ast.Call(function, [_, asked]) if resolve(function) in ASKED:
                    passed |= {*walk(asked)}
                case ast.Attribute(ast.Name() as owner, name) if owner not in built and name != LOADER:
                    passed.add(owner)  # a method or constant of the class
            for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                passed |= {*walk(part)} if isinstance(part, ast.AST) else set()
            for part in getattr(node, "decorator_list", ()):
                passed |= {*walk(part)}
        for node in walk(code):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in passed:
                name = (resolve(node) or "").removeprefix(".")
                if name in classes:
                    yield name, built.get(node, node)
            elif isinstance(node, ast.Call) and place.owner and _is_own_class(node.func, place.function):
                yield from ((name, node) for name in self._anatomy.below(place.owner))

    def given(
        self, init: FunctionNode, parameter: str, owners: Iterable[str]
    ) -> Iterator[tuple[Place, ast.expr | None]]:
        """The arguments for a parameter of an `__init__` that instances of these classes run, each with its place: in calls of
        the classes, and in subclasses that call the `__init__` of a base. None: no argument; `*<name>`: unknown."""
        anatomy, names, visited = self._anatomy, parameter_names(init), set[str]()
        for owner in owners:
            chain = [info for info in anatomy.lineage(owner) if "__init__" in info.methods]
            place = next((i for i, info in enumerate(chain) if info.methods["__init__"] is init), None)
            if place == 0:
                for where, code in self._built.get(owner, ()):
                    is_call = isinstance(code, ast.Call)
                    yield where, handed_to(code, names, parameter) if is_call else ast.Starred(code, ast.Load())
            for heir in chain[: place or 0]:
                below = f".{chain[(place or 0) - 1].name}"
                if heir.name in visited:
                    continue
                visited.add(heir.name)
                where = Place(heir.name, heir.methods["__init__"])
                for call in calls(heir.methods["__init__"]):
                    match call.func:
                        case ast.Attribute(ast.Call(ast.Name("super"), args), "__init__"):
                            start = anatomy.names.resolve(args[0]) if args else f".{heir.name}"
                            if start == below:
                                yield where, handed_to(call, names, parameter)
                        case ast.Attribute(base, "__init__") if (
                            anatomy.names.resolve(base) == f".{chain[place or 0].name}"
                        ):
                            yield where, handed_to(call, ["self", *names], parameter)

    def handed(self, owner: str, value: ast.AST) -> tuple[ast.expr | ast.stmt, ...]:
        """The values that a parameter of an `__init__`, or an attribute of one, may have: its arguments (`given`), its default,
        and what the `__init__` itself binds it to. Empty for anything else, and if nothing is passed.

        Args:
            owner: the class whose instance is meant.
            value: the parameter or its attribute, as an `__init__` of the file reads it; in new code, as the owner's does.
        """
        return tuple(dict.fromkeys(self._handed(owner, value, set()) or ()))

    def _handed(self, owner: str, value: ast.AST, visited: set[ast.AST]) -> list[ast.expr | ast.stmt] | None:
        """The same, following parameters that are passed on, each once; None instead of empty."""
        visited.add(value)
        base = value.value if isinstance(value, ast.Attribute) else value
        scope = self.scopes.get(base)
        home = scope.owner if scope else owner
        init = self._anatomy.method(home, "__init__")
        if init is None or not isinstance(base, ast.Name) or base.id not in parameter_names(init[1]):
            return None
        if scope is not None and scope.function is not init[1]:
            return None  # a parameter of another function
        is_bound = base.id in stored(init[1])
        if is_bound and isinstance(value, ast.Attribute):
            return None
        below = self._anatomy.below(owner)
        is_own = any(info.name == home for name in below for info in self._anatomy.lineage(name))
        builders = [*self.given(init[1], base.id, below if is_own else self._anatomy.below(home))]
        values: list[ast.expr | ast.stmt] = []
        if is_bound:
            values += self._through(owner, assigned_to(init[1], base.id) or [ast.Starred(base, ast.Load())], visited)
        for place, given in builders:
            parts = [given if given is not None else defaults_of(init[1]).get(base.id)]
            if isinstance(given, ast.Name) and place.function and given.id not in parameter_names(place.function):
                parts = assigned_to(place.function, given.id) or parts
            if isinstance(value, ast.Attribute):
                made = [part for part in parts if isinstance(part, ast.Call)]
                names = ((self._anatomy.names.resolve(part.func) or "").removeprefix(".") for part in made)
                values += (held for name in names for held in self._anatomy.held(name, value.attr))
            else:
                values += self._through(owner, [part for part in parts if part is not None], visited)
        return values if builders or values else None

    def _through(self, owner: str, values: Iterable[ast.expr], visited: set[ast.AST]) -> Iterator[ast.expr | ast.stmt]:
        """The values, with the values of a parameter in its place."""
        for value in values:
            if value not in visited:
                handed = self._handed(owner, value, visited)
                yield from [value] if handed is None else handed


def _is_own_class(called: ast.expr, function: FunctionNode | None) -> bool:
    """Whether a call in a method builds its own class: `type(self)(...)`, `self.__class__(...)`, `cls(...)`."""
    match called:
        case ast.Call(ast.Name("type"), [ast.Name("self")]):
            return True
        case ast.Name(name) if function is not None and function.decorator_list and function.args.args:
            is_of_class = any(ast.unparse(node) == "classmethod" for node in function.decorator_list)
            return is_of_class and name == function.args.args[0].arg
    return own_attribute(called) == "__class__"


def is_whole_config(place: Place, given: ast.expr) -> bool:
    """Whether an argument at a place is the config that the class there was itself built with."""
    is_new = place.function is None or "config" in stored(place.function)
    return ast.unparse(given) == "self.config" or (ast.unparse(given) == "config" and not is_new)
