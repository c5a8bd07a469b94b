"""What a file takes from the modeling files of others: code that is part of the model, and that no pass rewrites."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from patchgen import source
from patchgen.anatomy.classes import FunctionNode
from patchgen.anatomy.graph import Anatomy, references, study
from patchgen.anatomy.names import Names
from patchgen.errors import SourceSyntaxError
from patchgen.source import Module
from patchgen.upstream import Release, open_release


@dataclass(frozen=True)
class Imported:
    """A class or function of another modeling file that code of this file names."""

    name: str
    users: tuple[str, ...]  # the classes and functions of this file
    module: str
    anatomy: Anatomy | None  # of the other file; None where its source cannot be read


def imported_code(anatomy: Anatomy, module: Module) -> Iterator[Imported]:
    """What the classes and functions in `module` use of other models' files and of files beside this one."""
    nodes = {n: i.node for n, i in anatomy.classes.items()} | anatomy.functions
    used = {name: references(node) for name, node in nodes.items() if module.has(name)}
    read: dict[str, Anatomy | None] = {}
    for name, meaning in anatomy.names.imported().items():
        origin, _, original = meaning.rpartition(".")
        users = tuple(user for user, names in used.items() if name in names)
        is_model = origin.startswith(("transformers.models.", f"{anatomy.upstream.package}."))
        if not users or not is_model or "configuration_" in origin or origin.startswith("transformers.models.auto"):
            continue
        if origin not in read:
            read[origin] = _study(anatomy, origin)
        other = read[origin]
        if other is None or original in other.classes or original in other.functions:
            yield Imported(original, users, origin, other)


def _study(anatomy: Anatomy, origin: str) -> Anatomy | None:
    upstream = anatomy.upstream
    text = upstream.siblings.get(f"{origin.rpartition('.')[2]}.py")
    if text is None and upstream.release is not None:
        text = upstream.release.read(origin.removeprefix("transformers.").replace(".", "/") + ".py")
    try:
        parsed = source.parse(text or "")
    except SourceSyntaxError:
        return None
    return study(parsed, dataclasses.replace(upstream, text=text, module=origin)) if text is not None else None


def library_module(anatomy: Anatomy, name: str) -> Module:
    """A module of transformers; an empty one where the release has no file of that name."""
    return _read(
        anatomy.upstream.release or open_release(), name.removeprefix("transformers.").replace(".", "/") + ".py"
    )


@functools.lru_cache(maxsize=64)
def _read(release: Release, path: str) -> Module:
    return source.parse(release.read(path) or "", path)


@functools.lru_cache(maxsize=64)
def library_names(module: Module, name: str) -> Names:
    """What the names of a module of transformers stand for."""
    statements = [statement for block in module for statement in block.statements]
    return Names(statements, lambda level: name.split(".")[:-level])


def library_function(anatomy: Anatomy, meaning: str | None) -> FunctionNode | None:
    """The function of transformers that a name stands for, also where its module has it from another one."""
    package, _, name = (meaning or "").rpartition(".")
    if not package.startswith("transformers."):
        return None
    module = library_module(anatomy, package)
    if module.has(name):
        node = module.block(name).node
        return node if isinstance(node, FunctionNode) else None
    return library_function(anatomy, library_names(module, package).imported().get(name))
