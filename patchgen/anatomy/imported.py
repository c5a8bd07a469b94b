"""What a file imports from other modeling files: code that is part of the model, but that no pass rewrites."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from patchgen import source
from patchgen.anatomy.classes import FunctionNode, auto_class, walk
from patchgen.anatomy.graph import Anatomy, references, study
from patchgen.anatomy.names import Names
from patchgen.errors import SourceSyntaxError
from patchgen.source import Module
from patchgen.upstream import Release, open_release


@dataclass(frozen=True)
class Imported:
    """A class or function of a modeling file that code names; of another file, unless it comes from `definition`."""

    name: str
    module: str
    anatomy: Anatomy | None  # of the file that defines it; None where its source cannot be read
    users: tuple[str, ...] = ()  # the classes and functions of this file that use it

    @property
    def use(self) -> str:
        """The first use, in words."""
        return f"{self.users[0]} uses {self.name} of {self.module}"


def imported_code(anatomy: Anatomy, module: Module) -> Iterator[Imported]:
    """What the classes and functions in `module` use of other models' files and of files beside this one, followed through
    re-exports to the file that defines it."""
    nodes = {n: i.node for n, i in anatomy.classes.items()} | anatomy.functions
    used = {name: references(node) for name, node in nodes.items() if module.has(name)}
    for name, meaning in anatomy.names.imported().items():
        users = [user for user, names in used.items() if name in names]
        if not users or not _is_of_a_model(anatomy, meaning):
            continue
        is_module = _study(anatomy, meaning) is not None  # then its members are what is used
        uses = {user: _members(anatomy, nodes[user], meaning) if is_module else {meaning} for user in users}
        for code in sorted(set[str]().union(*uses.values())) or [meaning]:  # or the module itself is passed on
            part = definition(anatomy, code)
            if part is not None:
                users_of_it = tuple(user for user in users if code in uses[user] or not uses[user])
                yield dataclasses.replace(part, users=users_of_it)


def definition(anatomy: Anatomy, meaning: str) -> Imported | None:
    """The class or function that a resolved name (`Names.resolve`) refers to, in the file that defines it: this one, another
    model's or one beside it. None for other values and for what libraries define."""
    passed_on: set[str] = set()
    while meaning not in passed_on:
        passed_on.add(meaning)
        origin, _, name = meaning.rpartition(".")
        if origin and not _is_of_a_model(anatomy, meaning):
            break
        other = _study(anatomy, origin) if origin else anatomy
        if other is None or name in other.classes or name in other.functions:
            return Imported(name, origin or anatomy.upstream.module, other)
        anatomy, meaning = other, other.names.imported().get(name, "")
    return None


def auto_classes_in(part: Imported) -> set[str]:
    """The Auto classes that a class or function uses, directly or through the code of models that it names."""
    pending, auto_classes, known = [part], set[str](), set[tuple[str, str]]()
    while pending:
        current = pending.pop()
        other = current.anatomy
        if other is None or (current.module, current.name) in known:
            continue
        known.add((current.module, current.name))
        node = other.functions.get(current.name) or other.classes[current.name].node
        meanings = {other.names.resolve(child) or "" for child in walk(node)}
        auto_classes |= set(map(auto_class, meanings)) - {""}
        pending += filter(None, (definition(other, meaning) for meaning in meanings))
    return auto_classes


def _is_of_a_model(anatomy: Anatomy, meaning: str) -> bool:
    """Whether a resolved name is of another modeling file, or of a file beside this one."""
    is_near = meaning.startswith(("transformers.models.", f"{anatomy.upstream.package}."))
    return is_near and "configuration_" not in meaning and not f"{meaning}.".startswith("transformers.models.auto.")


def _members(anatomy: Anatomy, node: ast.AST, module: str) -> set[str]:
    """The full names of the members of a module that code reads."""
    meanings = {anatomy.names.resolve(child) or "" for child in walk(node) if isinstance(child, ast.Attribute)}
    return {meaning for meaning in meanings if meaning.rpartition(".")[0] == module}


def _study(anatomy: Anatomy, module: str) -> Anatomy | None:
    """The anatomy of a modeling file, by its module; None where its source cannot be read."""
    if module not in anatomy.others:
        anatomy.others[module] = other = _read_and_study(anatomy, module)
        if other is not None:
            other.others = anatomy.others
    return anatomy.others[module]


def _read_and_study(anatomy: Anatomy, module: str) -> Anatomy | None:
    upstream, (package, _, name) = anatomy.upstream, module.rpartition(".")
    text = upstream.siblings.get(f"{name}.py") if package == upstream.package else None
    if text is None and upstream.release is not None:
        text = upstream.release.read(_file_of(module))
    try:
        parsed = source.parse(text or "")
    except SourceSyntaxError:
        return None
    return study(parsed, dataclasses.replace(upstream, text=text, module=module)) if text is not None else None


def library_module(anatomy: Anatomy, name: str) -> Module:
    """A module of transformers; an empty one where the release has no file of that name."""
    return _read(anatomy.upstream.release or open_release(), _file_of(name))


def _file_of(module: str) -> str:
    return module.removeprefix("transformers.").replace(".", "/") + ".py"


@functools.lru_cache(maxsize=64)
def _read(release: Release, path: str) -> Module:
    return source.parse(release.read(path) or "", path)


@functools.lru_cache(maxsize=64)
def library_names(module: Module, name: str) -> Names:
    """The names of a module of transformers, to resolve them."""
    return Names(module.statements, lambda level: name.split(".")[:-level])


def library_function(anatomy: Anatomy, meaning: str | None) -> FunctionNode | None:
    """The function of transformers that a resolved name refers to, also if its module imports it; None for anything else."""
    package, _, name = (meaning or "").rpartition(".")
    if not package.startswith("transformers."):
        return None
    module = library_module(anatomy, package)
    if module.has(name):
        node = module.block(name).node
        return node if isinstance(node, FunctionNode) else None
    return library_function(anatomy, library_names(module, package).imported().get(name))
