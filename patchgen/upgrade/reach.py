"""The code of transformers that a modeling file can run: the symbols of other files that its own lead to, by import and name.

    LlamaModel.forward -> create_causal_mask (masking_utils) -> sdpa_mask -> and_masks ...
    self.post_init()   -> PreTrainedModel.post_init (modeling_utils) -> PreTrainedModel.init_weights ...

A class that is reached leads to its bases, its fields, its special methods (`__init__`, `__call__`), `forward`, and whatever
`self.NAME` in these stands for. The auto classes are not followed: they list every model. A table in which code looks up the
name of the model's class, as upstream does to choose the loss, leads only to its entries for the model's classes, if any.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from patchgen.anatomy.classes import FunctionNode, is_list
from patchgen.anatomy.names import Names, local_names
from patchgen.source import bound_names
from patchgen.upgrade.symbols import Symbol, symbols_of_statements
from patchgen.upstream import Release

AUTO_CLASSES = "models/auto/"
CLASS_NAMES = ("self.__class__.__name__", "type(self).__name__")
SymbolPlace = tuple[str, str]
"""A file of the package and a symbol in it: ("masking_utils.py", "create_causal_mask")."""
Follows = Callable[[SymbolPlace, SymbolPlace], bool]
"""Whether the step from one symbol to another counts."""


def is_config(path: str) -> bool:
    """Whether a file of the package is the configuration of a model."""
    return path.startswith("models/") and path.rpartition("/")[2].startswith("configuration_")


@dataclass(frozen=True)
class File:
    """A file of a release: its symbols, and what its names stand for."""

    path: str
    text: str
    symbols: Mapping[str, Symbol]
    names: Names
    imports: Mapping[str, str]  # name -> dotted name, of every `from` import, those in branches included


class Library:
    """The files of a release, read on first use."""

    def __init__(self, release: Release) -> None:
        self.release = release
        self.file = functools.cache(self._file)
        self._find = functools.cache(self._locate)
        self._successors: dict[SymbolPlace, tuple[SymbolPlace, ...]] = {}
        self._class_tables: set[SymbolPlace] = set()  # see `_looked_up_tables`

    def _file(self, path: str) -> File | None:
        text = self.release.read(path)
        return None if text is None else read_file(path, text)

    def require_file(self, path: str) -> File:
        """The file of a symbol that was reached."""
        file = self.file(path)
        if file is None:
            raise LookupError(f"{self.release.origin} has no file {path}, although a symbol was found in it.")
        return file

    def locate(self, dotted: str) -> tuple[str, list[str]] | None:
        """The file that defines a dotted name of the package, through re-exports, and the parts of the name after it; or None."""
        return self._find(dotted)

    def _locate(self, dotted: str, depth: int = 0) -> tuple[str, list[str]] | None:
        parts = dotted.split(".")
        if parts[0] != "transformers" or depth > 8:
            return None
        for end in range(len(parts), 0, -1):
            base = "/".join(parts[1:end])
            for path in (f"{base}.py", f"{base}/__init__.py".lstrip("/")):
                file = self.file(path) if base or end == 1 else None
                if file is not None:
                    return self._locate_in(file, parts[end:], depth)
        return None

    def _locate_in(self, file: File, parts: list[str], depth: int) -> tuple[str, list[str]] | None:
        if not parts or parts[0] in file.symbols:
            return file.path, parts
        meaning = file.imports.get(parts[0])
        return self._locate(".".join([meaning, *parts[1:]]), depth + 1) if meaning else None

    # ---------------------------------------------------------------------------------------------- closure

    def reached_from(
        self, roots: Iterable[SymbolPlace], classes: Iterable[str] = (), follows: Follows | None = None
    ) -> dict[SymbolPlace, SymbolPlace | None]:
        """Every symbol that roots lead to, roots included -> the symbol that led there first; None for roots.

        Args:
            classes: names of the model's classes; tables by class name lead only to their entries for these.
            follows: whether the step from one symbol to another counts; by default every step does.
        """
        roots, classes = list(roots), list(classes)
        found = self._closure(roots, {}, follows)
        entries = {table: self._entries(table, classes) for table in self._class_tables & found.keys()}
        entries = {table: places for table, places in entries.items() if places}
        return self._closure(roots, entries, follows) if entries else found

    def _closure(
        self, roots: Iterable[SymbolPlace], entries: Mapping[SymbolPlace, list[SymbolPlace]], follows: Follows | None
    ) -> dict[SymbolPlace, SymbolPlace | None]:
        predecessors: dict[SymbolPlace, SymbolPlace | None] = dict.fromkeys(roots)
        pending = list(predecessors)
        while pending:
            place = pending.pop()
            if place not in self._successors:
                self._successors[place] = tuple(self._leads_to(place))
            for other in entries.get(place, self._successors[place]):
                if other not in predecessors and (follows is None or follows(place, other)):
                    predecessors[other] = place
                    pending.append(other)
        return predecessors

    def _entries(self, table: SymbolPlace, classes: list[str]) -> list[SymbolPlace]:
        """What a table's entries for these classes name: those with a key that is part of a class name, such as "ForCausalLM"."""
        file = self.require_file(table[0])
        values = [getattr(node, "value", None) for node in file.symbols[table[1]].nodes]
        dicts = [value for value in values if isinstance(value, ast.Dict)]
        entries = [
            value
            for node in dicts
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and any(str(key.value) in name for name in classes)
        ]
        return [place for value in entries for place in self._names_in(file, value, with_annotations=False)]

    def _leads_to(self, place: SymbolPlace) -> Iterator[SymbolPlace]:
        """The symbols that one symbol leads to directly."""
        path, name = place
        file = self.require_file(path)
        symbol = file.symbols.get(name)
        if symbol is None:
            return
        owner, _, member = name.partition(".")
        is_class = not member and any(isinstance(node, ast.ClassDef) for node in symbol.nodes)
        if is_class:
            yield from ((path, member_name) for member_name in self._members(file, owner))
        for node in symbol.nodes:
            for table in _looked_up_tables(node):
                self._class_tables |= set(self._names_in(file, table, with_annotations=False))
            yield from self._names_in(file, node, with_annotations=False)
            for attribute in _self_attributes(node) if member else ():
                yield from self.attribute_definition(path, owner, attribute)

    def _members(self, file: File, owner: str) -> Iterator[str]:
        """The members that a class leads to."""
        is_configuration = is_config(file.path)
        for name, symbol in file.symbols.items():
            class_name, _, member = name.partition(".")
            if class_name == owner and member:
                is_method = any(isinstance(node, FunctionNode) for node in symbol.nodes)
                is_called = member == "forward" or (member.startswith("__") and member.endswith("__"))
                if is_configuration or not is_method or is_called:
                    yield name

    def _names_in(self, file: File, node: ast.AST, *, with_annotations: bool) -> Iterator[SymbolPlace]:
        local = local_names(node) if isinstance(node, FunctionNode) else ()
        for name in _expressions(node, with_annotations):
            meaning = file.names.resolve(name, local)
            if meaning is None and isinstance(name, ast.Name) and name.id not in local:
                meaning = file.imports.get(name.id)  # imported in a branch
            if meaning is not None:
                yield from self._places_of(file, meaning)

    def _places_of(self, file: File, meaning: str) -> Iterator[SymbolPlace]:
        located = self._locate_in(file, meaning[1:].split("."), 0) if meaning.startswith(".") else self.locate(meaning)
        if located is None or not located[1] or located[0].startswith(AUTO_CLASSES):
            return
        path, (name, *attributes) = located
        yield path, name
        if attributes:
            yield from self._attribute_of(path, name, attributes[0])

    def _attribute_of(self, path: str, name: str, attribute: str) -> Iterator[SymbolPlace]:
        """What `NAME.attribute` is, if NAME is a class, or a module-level instance of one."""
        symbol = self.require_file(path).symbols[name]
        for node in symbol.nodes:
            value = getattr(node, "value", None)
            if isinstance(node, ast.ClassDef):
                yield from self.attribute_definition(path, name, attribute)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Call):
                for place in self._names_in(self.require_file(path), value.func, with_annotations=False):
                    yield from self.attribute_definition(*place, attribute)

    def attribute_definition(self, path: str, owner: str, attribute: str) -> list[SymbolPlace]:
        """The place that defines an attribute: in a class, or in the first of its bases that has it, breadth first; or none."""
        visited, pending = set[SymbolPlace](), [(path, owner)]
        while pending:
            place = pending.pop(0)
            file = self.file(place[0])
            if place in visited or file is None or place[1] not in file.symbols:
                continue
            visited.add(place)
            if f"{place[1]}.{attribute}" in file.symbols:
                return [(place[0], f"{place[1]}.{attribute}")]
            heads = [node for node in file.symbols[place[1]].nodes if isinstance(node, ast.ClassDef)]
            bases = [base for head in heads for base in head.bases]
            pending += [p for base in bases for p in self._names_in(file, base, with_annotations=False)]
        return []

    # ------------------------------------------------------------------------------------------------ roots

    def helpers_of(
        self, path: str, text: str, kept: Iterable[str], follows: Follows | None = None
    ) -> dict[SymbolPlace, SymbolPlace | None]:
        """The symbols of other files that code of a modeling file leads to.

        Args:
            path: the file's path in the package.
            text: its source.
            kept: those of its classes and functions whose code counts.
            follows: as `reached_from` takes it.
        """
        file, kept = read_file(path, text), set(kept)
        roots: dict[SymbolPlace, None] = {}
        for name, symbol in file.symbols.items():
            owner = name.partition(".")[0]
            is_code = any(isinstance(node, ast.ClassDef | FunctionNode) for node in symbol.nodes)
            if owner not in kept and ("." in name or is_code):
                continue
            for node in symbol.nodes:
                for place in self._names_in(file, node, with_annotations=False):
                    roots[place] = None
                for place in self._names_in(file, node, with_annotations=True):
                    if is_config(place[0]):  # `config: LlamaConfig` is how a configuration is named
                        roots[place] = None
                for attribute in _self_attributes(node) if "." in name else ():
                    roots.update(dict.fromkeys(self._inherited(file, owner, attribute)))
        reached = self.reached_from((place for place in roots if place[0] != path), kept, follows)
        return {place: via for place, via in reached.items() if place[0] != path}

    def _inherited(self, file: File, owner: str, attribute: str) -> Iterator[SymbolPlace]:
        """The definition of an attribute that a class of the file inherits from another file."""
        pending, visited = [owner], set[str]()
        while pending:
            name = pending.pop(0)
            if f"{name}.{attribute}" in file.symbols:
                return
            if name in visited:
                continue
            visited.add(name)
            for head in file.symbols[name].nodes if name in file.symbols else ():
                for base in getattr(head, "bases", ()):
                    meaning = file.names.resolve(base) or ""
                    if meaning.startswith("."):
                        pending.append(meaning[1:])
                    elif (found := self.locate(meaning)) and found[1]:
                        yield from self.attribute_definition(found[0], found[1][0], attribute)


@functools.lru_cache(maxsize=1024)
def read_file(path: str, text: str) -> File:
    """A parsed file of the package; a file that is equal in two releases is parsed once.

    Raises:
        SyntaxError: it is not valid Python.
    """
    nodes = ast.parse(text).body
    package = ["transformers", *path.split("/")[:-1]]

    def base_of(level: int) -> list[str]:
        return package[: max(len(package) + 1 - level, 0)]

    imports: dict[str, str] = {}
    for node in _module_scope(nodes):
        if isinstance(node, ast.ImportFrom):
            base = [*(base_of(node.level) if node.level else []), *filter(None, [node.module])]
            imports |= {alias.asname or alias.name: ".".join([*base, alias.name]) for alias in node.names}
    return File(path, text, symbols_of_statements(nodes, is_config=is_config(path)), Names(nodes, base_of), imports)


def _module_scope(nodes: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in nodes:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _module_scope(child for child in ast.walk(node) if isinstance(child, ast.ImportFrom))


def _expressions(node: ast.AST, with_annotations: bool) -> Iterator[ast.expr]:
    """The names and attributes in code, assigned ones included; those of annotations only if asked for."""
    pending = [node]
    while pending:
        current = pending.pop()
        if isinstance(current, ast.Attribute | ast.Name):
            yield current
        for name, value in ast.iter_fields(current):
            if name in ("annotation", "returns") and not with_annotations:
                continue
            pending += [child for child in (value if is_list(value) else [value]) if isinstance(child, ast.AST)]


def _looked_up_tables(node: ast.AST) -> Iterator[ast.expr]:
    """The tables in which code looks up the name of its class: `kind = self.__class__.__name__`, then `kind in TABLE`."""
    assigned = (child for child in ast.walk(node) if isinstance(child, ast.Assign))
    names = {
        ast.unparse(assignment.targets[0]) for assignment in assigned if ast.unparse(assignment.value) in CLASS_NAMES
    }
    for child in ast.walk(node) if names else ():
        if isinstance(child, ast.Compare) and isinstance(child.ops[0], ast.In | ast.NotIn):
            yield from child.comparators[:1] if ast.unparse(child.left) in names else ()


def _self_attributes(node: ast.AST) -> set[str]:
    """The attributes of `self`, `cls` and `super()` that code reads."""
    attributes: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
            owner = child.value
            is_super = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
            if is_super or (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                attributes.add(child.attr)
    return attributes


def exported(file: File) -> set[str]:
    """The names that other files can import from a file."""
    return {*file.symbols, *file.imports, *(name for node in ast.parse(file.text).body for name in bound_names(node))}
