"""Where a file builds its classes, and the arguments that it passes to their `__init__`.

A class that is used other than by a call (as an entry of a table, under another name) may be built with any arguments there.
They are unknown, and recorded as `*Name`, which no reader takes for a value. The same holds for every class where code asks an
object for its class, or runs an `__init__`, in a form that is not read.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchgen.anatomy.classes import (
    FunctionNode,
    assigned_to,
    base_name,
    calls,
    constructed,
    defaults_of,
    handed_to,
    is_shadowed,
    own_attribute,
    parameter_names,
    stored,
    stores_of,
    walk,
)
from patchgen.anatomy.names import CONFIG, is_of_config

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
        everything = [*self._code()]
        nodes = [node for _, code in everything for node in walk(code)]
        self._looked_up = {base_name(node) for node in nodes if isinstance(node, ast.Subscript)}
        for place, code in everything:
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
        for node in self._anatomy.names.outside_classes:
            yield Place("", node if isinstance(node, FunctionNode) else None), node

    def _mentioned(self, place: Place, code: ast.AST) -> Iterator[tuple[str, ast.expr]]:
        """Each class that code may build: with its call, or as `*Name` where it is used in another way."""
        if isinstance(code, ast.Assign | ast.AnnAssign) and RECORDED in stored(code):
            return
        built = {constructed(call): call for call in calls(code) if not _is_init(call.func)}
        read = {call.func for call in calls(code) if _is_init(call.func) and self._is_read(place, call)}
        passed = self._only_asked_for(code, built)
        for node in walk(code):
            if isinstance(node, ast.expr) and node not in passed and node not in read:
                for name in self._classes_of(place, node):
                    yield name, built.get(node) or ast.Starred(node, ast.Load())

    def _only_asked_for(self, code: ast.AST, built: Container[ast.AST]) -> set[ast.AST]:
        """The parts of code that may name a class, but build none."""
        resolve, passed = self._anatomy.names.resolve, set[ast.AST]()
        for node in walk(code):
            match node:
                case ast.Call(function, [_, asked]) if resolve(function) in ASKED:
                    passed |= {*walk(asked)}
                case ast.Call(ast.Name("super"), args):
                    passed |= {*args}
                case ast.Attribute(owner, name) if owner not in built and name != LOADER and not self._table(owner):
                    passed.add(owner)  # a method or constant of the class
                case ast.Subscript(table):
                    passed.add(table)  # an entry of it
                case ast.Assign([table], ast.Dict(_, entries)) if self._table(table):
                    passed |= {entry for entry in entries if self._named(entry)}  # built where code reads the table
                case ast.Compare(left, _, others):
                    passed |= {left, *others}
                case ast.FormattedValue(shown):
                    passed.add(shown)
            for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                passed |= {*walk(part)} if isinstance(part, ast.AST) else set()
            for part in getattr(node, "decorator_list", ()):
                passed |= {*walk(part)}
        return passed

    def _classes_of(self, place: Place, node: ast.expr) -> Iterable[str]:
        """The classes of the file that an expression may be, or whose `__init__` it may be."""
        classes, resolve = self._anatomy.classes, self._anatomy.names.resolve
        if place.owner and _is_own_class(node, place.function):
            return self._anatomy.below(place.owner)
        match node:
            case ast.Name(ctx=ast.Load()):
                return self._named(node, *self._table(node))
            case ast.Subscript(table):
                return self._named(*self._table(table))
            case ast.Call(function, [asked], []) if resolve(function) == "builtins.type":
                return classes if self._may_be_own(asked) else ()
            case ast.Attribute(asked, "__class__"):
                return classes if self._may_be_own(asked) else ()
            case ast.Attribute(base, "__init__"):
                return classes if (resolve(base) or ".").startswith(".") else ()  # else a library's
        return ()

    def _named(self, *code: ast.expr) -> set[str]:
        """The classes of the file that expressions name."""
        return {*map(self._anatomy.names.here, code)} & self._anatomy.classes.keys()

    def _table(self, node: ast.expr) -> list[ast.expr]:
        """The entries of a dict that the module assigns to a name, where the file looks them up and does not change them."""
        anatomy, name = self._anatomy, node.id if isinstance(node, ast.Name) else ""
        table, statements = anatomy.tables.get(name), anatomy.names.statements.get(name, ())
        is_told = name in self._looked_up and len(statements) == 1 and anatomy.names.resolve(node) == f".{name}"
        return table.values if is_told and isinstance(table, ast.Dict) else []

    def _may_be_own(self, asked: ast.expr) -> bool:
        """Whether an object may be of a class of the file. What an attribute holds that none of these has is of other files."""
        infos, name = self._anatomy.classes.values(), getattr(asked, "attr", "")
        return not isinstance(asked, ast.Attribute) or any(name in i.methods or stores_of(i, name) for i in infos)

    def _is_read(self, place: Place, call: ast.Call) -> bool:
        """Whether `given` reads a call of an `__init__`: in an `__init__`, of a base."""
        init, base = self._anatomy.method(place.owner, "__init__"), getattr(call.func, "value", None)
        if init is None or init[1] is not place.function:
            return False
        if isinstance(base, ast.Call):
            return isinstance(base.func, ast.Name) and base.func.id == "super"
        lineage = {f".{info.name}" for info in self._anatomy.lineage(place.owner)}
        return self._anatomy.names.resolve(base) in lineage and ast.unparse([*call.args, call][0]) == "self"

    def given(
        self, init: FunctionNode, parameter: str, owners: Iterable[str]
    ) -> Iterator[tuple[Place, ast.expr | None]]:
        """The arguments for a parameter of an `__init__` that instances of these classes run, each with its place: in calls of
        the classes, and in subclasses that call the `__init__` of a base. None: no argument; `*<name>`: unknown."""
        anatomy, names, visited = self._anatomy, parameter_names(init), set[ast.AST]()
        for owner in owners:
            chain = [info for info in anatomy.lineage(owner) if "__init__" in info.methods]
            place = next((i for i, info in enumerate(chain) if info.methods["__init__"] is init), None)
            if place == 0:
                for where, code in self._built.get(owner, ()):
                    yield where, handed_to(code, names, parameter) if isinstance(code, ast.Call) else code
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

    def handed(self, owner: str, value: ast.AST) -> tuple[ast.expr | ast.stmt, ...]:
        """The values that a parameter of an `__init__`, or an attribute of one, may have: its arguments (`given`), its default,
        and what the `__init__` itself binds it to; for an instance of the class `owner`, whose `__init__` is meant where the value
        is new code. Empty for anything else, and if nothing is passed."""
        return tuple(dict.fromkeys(self._handed(owner, value, set()) or ()))

    def _handed(self, owner: str, value: ast.AST, visited: set[ast.AST]) -> list[ast.expr | ast.stmt] | None:
        """The same, following parameters that are passed on, each once; None instead of empty."""
        base = value.value if isinstance(value, ast.Attribute) else value
        visited |= {value, base}
        scope = self.scopes.get(base)
        home = scope.owner if scope else owner
        init = self._anatomy.method(home, "__init__")
        if init is None or not isinstance(base, ast.Name) or base.id not in parameter_names(init[1]):
            return None
        if scope is not None and scope.function is not init[1]:
            return None  # a parameter of another function
        if is_shadowed(init[1], base.id):
            return [ast.Starred(base, ast.Load())]
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
            known = [part for part in parts if part is not None]
            if not isinstance(value, ast.Attribute):
                values += self._through(owner, known, visited)
            else:
                values += (held for part in known for held in self._held_by(owner, part, value, visited))
        return values if builders or values else None

    def _held_by(
        self, owner: str, part: ast.expr, value: ast.Attribute, visited: set[ast.AST]
    ) -> Iterable[ast.expr | ast.stmt]:
        """The values of the attribute that `value` reads, if `part` is passed for its parameter; a config's attribute stays as it
        is: a caller chooses it."""
        built = self._anatomy.names.here(getattr(part, "func", None))
        if held := self._anatomy.held(built, value.attr):
            return held
        if part in visited or is_of_config(value) or isinstance(part, ast.Constant):
            return ()  # None and the like have no such attribute
        if isinstance(part, ast.Starred):
            return [part]
        read = ast.Attribute(part, value.attr, ast.Load())
        if self._anatomy.names.is_config(part):
            return [read]
        handed = self._handed(owner, read, visited)
        return [ast.Starred(part, ast.Load())] if handed is None else handed

    def _through(self, owner: str, values: Iterable[ast.expr], visited: set[ast.AST]) -> Iterator[ast.expr | ast.stmt]:
        """The values, with the values of a parameter in its place."""
        for value in values:
            if value not in visited:
                handed = self._handed(owner, value, visited)
                yield from [value] if handed is None else handed

    def is_whole_config(self, place: Place, given: ast.AST | None) -> bool:
        """Whether an argument at a place is the config that the class there was itself built with: its `__init__` binds the name
        once, as its parameter; or it is `self.config`, and neither code of the class nor a base's `__init__` gets another."""
        if isinstance(given, ast.Name):
            init = place.function if place.function and place.function.name == "__init__" else None
            if init is None or given.id != CONFIG or CONFIG not in parameter_names(init):
                return False
            return not is_shadowed(init, CONFIG) and CONFIG not in stored(init)
        if given is None or own_attribute(given) != CONFIG or self._anatomy.is_stored_outside(CONFIG, [place.owner]):
            return False
        family = self._anatomy.family(place.owner)
        inits = [info.methods["__init__"] for info in family if "__init__" in info.methods]
        kept = [value for info in family for value in stores_of(info, CONFIG)]
        handed = (handed_to(call, [CONFIG], CONFIG) for init in inits for call in calls(init) if _is_init(call.func))
        kept += [value for value in handed if value is not None]
        return all(isinstance(value, ast.Name) and self.is_whole_config(self.scopes[value], value) for value in kept)


def _is_own_class(code: ast.expr, function: FunctionNode | None) -> bool:
    """Whether an expression in a method is the class of its instance: `type(self)`, `self.__class__`, `cls`."""
    match code:
        case ast.Call(ast.Name("type"), [ast.Name("self")]) | ast.Name("__class__"):
            return True
        case ast.Name(name, ast.Load()) if function is not None and function.decorator_list and function.args.args:
            is_of_class = any(ast.unparse(node) == "classmethod" for node in function.decorator_list)
            return is_of_class and name == function.args.args[0].arg
    return own_attribute(code) == "__class__"


def _is_init(called: ast.AST) -> bool:
    return isinstance(called, ast.Attribute) and called.attr == "__init__"
