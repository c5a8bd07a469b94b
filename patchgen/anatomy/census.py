"""The classes and functions on the way from a head's inputs to its loss, and why each may stay as it is.

A class is on the way if code on the way reads the attribute that holds it, a function if it is called there. What no pass
rewrote is named with the reason; what nothing is known of is `UNREAD`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Iterable, Mapping

from patchgen.anatomy.classes import FunctionNode, own_attribute, parameter_names
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import Role
from patchgen.anatomy.tokenwise import mixing

COVERED = "passes"
UNREAD = "not read"
TOKENWISE = "each token by itself"
PARTS = "runs what is listed here"
ELSEWHERE = "another file's, which no pass reads"
ROLES = {Role.ROTARY: "positions", Role.ROUTER: "a router", Role.ATTENTION: "attention"}


def census(anatomy: Anatomy, heads: Iterable[str], hits: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Name -> the passes that rewrote it, or why it is left alone, in the order in which they are reached.

    Args:
        anatomy: of the file.
        heads: where the way begins.
        hits: class or function -> the passes that hit it, or found upstream doing their work there.
    """
    walk = _Walk(anatomy)
    for head in heads:
        walk.enter(head)
    towers = anatomy.reached_from(i.name for role in (Role.VISION, Role.AUDIO) for i in anatomy.with_role(role))
    found = {}
    for name in walk.reached:
        names = [info.name for info in anatomy.lineage(name)] or [name]  # a function has no lineage
        passes = dict.fromkeys(one for part in names for one in hits.get(part, ()))
        found[name] = f"{COVERED}: {', '.join(passes)}" if passes else _reason(name, anatomy, towers, walk.reached)
    return found | dict.fromkeys(walk.outside, ELSEWHERE) | walk.unread


def summary(found: Mapping[str, str]) -> str:
    """The census in one line: how many passes rewrote, and the names of the others by reason."""
    groups: dict[str, list[str]] = {}
    for name, reason in found.items():
        groups.setdefault(reason.split(":")[0], []).append(name)
    covered = groups.pop(COVERED, [])
    listed = "".join(f"; {reason}: {', '.join(names)}" for reason, names in sorted(groups.items()))
    return f"{len(covered)} of {len(found)} classes and functions on the way to the loss in passes{listed}"


class _Walk:
    """What code reaches: classes and functions of the file, and the names of others' that are no library's."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        self._seen: set[tuple[str, str]] = set()
        self.reached: dict[str, None] = {}
        self.outside: dict[str, None] = {}
        self.unread: dict[str, str] = {}

    def enter(self, name: str) -> None:
        """An instance of the class that is called."""
        if self._anatomy.method(name, "forward") is not None:
            self.reached.setdefault(name)
            self._method(name, "forward")

    def _method(self, owner: str, method: str) -> None:
        found = self._anatomy.method(owner, method)
        if found is not None and (owner, method) not in self._seen:
            self._seen.add((owner, method))
            self._code(found[1], owner)

    def _code(self, function: FunctionNode, owner: str) -> None:
        local = local_names(function)
        for node in ast.walk(function):
            if owner and (attribute := own_attribute(node)) is not None:
                self._method(owner, attribute)
                self._attribute(owner, attribute)
            if isinstance(node, ast.Call):
                self._meant(node.func, local)
                if owner and (attribute := own_attribute(node.func)) is not None:
                    self._require_known(owner, attribute)

    def _attribute(self, owner: str, attribute: str) -> None:
        if (owner, f".{attribute}") in self._seen:
            return
        self._seen.add((owner, f".{attribute}"))
        for build in (*self._anatomy.builds(owner), *self._anatomy.auto_builds(owner)):
            if build.attribute == attribute and (target := self._anatomy.target_of(build)):
                self.enter(target) if target in self._anatomy.classes else self.outside.setdefault(target)
        nodes, local = self._assigned(owner, attribute)
        for node in nodes:
            if isinstance(node, ast.Call | ast.Subscript):
                self._meant(node.func if isinstance(node, ast.Call) else node.value, local)

    def _assigned(self, owner: str, attribute: str) -> tuple[list[ast.AST], set[str]]:
        """What __init__ assigns to an attribute, its parts too, and the names of that scope; the first is the whole."""
        value, init = self._anatomy.attribute(owner, attribute), self._anatomy.method(owner, "__init__")
        return (list(ast.walk(value)), local_names(init[1])) if value is not None and init is not None else ([], set())

    def _require_known(self, owner: str, attribute: str) -> None:
        """An attribute that is called and that no name tells anything of."""
        nodes, local = self._assigned(owner, attribute)
        is_known = any(self._anatomy.names.resolve(node, local) for node in nodes)
        if nodes and not is_known and self._anatomy.method(owner, attribute) is None:
            self.unread[f"{owner}.{attribute}"] = f"{UNREAD}: {ast.unparse(nodes[0])}"

    def _meant(self, node: ast.AST, local: Container[str]) -> None:
        """What an expression stands for that is called, or looked up in: a class, a function, a table of them."""
        meaning = self._anatomy.names.resolve(node, local) or ""
        name = meaning.removeprefix(".")
        if not meaning.startswith("."):
            if meaning and not _is_library(meaning):
                self.outside.setdefault(meaning)
        elif name in self._anatomy.classes:
            self.enter(name)
        elif ("", name) not in self._seen:
            self._seen.add(("", name))
            if name in self._anatomy.functions:
                self.reached.setdefault(name)
                self._code(self._anatomy.functions[name], "")
            for part in ast.walk(self._anatomy.tables[name]) if name in self._anatomy.tables else ():
                self._meant(part, ())


def _is_library(meaning: str) -> bool:
    """Of torch, of Python, or of what transformers shares among its models."""
    package = meaning.split(".")[0]
    if package == "transformers":
        return not meaning.startswith("transformers.models.") or meaning.startswith("transformers.models.auto.")
    return package in ("torch", "numpy") or package in sys.stdlib_module_names


def _reason(name: str, anatomy: Anatomy, towers: Container[str], reached: Container[str]) -> str:
    info = anatomy.classes.get(name)
    function = anatomy.functions[name] if info is None else anatomy.method(name, "forward")[1]
    for role, reason in ROLES.items():
        if info is not None and role in info.roles:
            return f"{reason}: {info.roles[role]}" if role == Role.ATTENTION else reason
    mixed = mixing(function.body, set(parameter_names(function)), name, anatomy)
    if mixed is None:
        return TOKENWISE
    if any(build.target in reached for build in anatomy.builds(name)):
        return PARTS
    return f"{UNREAD}{', in a tower' if name in towers else ''}: {ast.unparse(mixed).splitlines()[0]}"
