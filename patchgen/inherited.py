"""What a file on disk inherits or uses of transformers' modeling files is taken into it, so that passes rewrite it.

    class MyAttention(Qwen3MoeAttention):        Qwen3MoeAttention, and what it needs of its file, stand above MyAttention;
        def forward(self, ...):                  it stays a class
            return super().forward(...)          so `super()` works as before

Names stay as they are, but for those that are bound to something else: `Qwen2MLP` becomes `Qwen2MLPOfQwen2`, `rotate_half`
becomes `rotate_half_of_qwen2`.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from patchgen import emit, source
from patchgen.anatomy.classes import base_name
from patchgen.anatomy.graph import references
from patchgen.anatomy.names import Names
from patchgen.config_classes import read_configs
from patchgen.errors import ConfigError
from patchgen.rewrite import format_code
from patchgen.source import Block, Module
from patchgen.upstream import Release, Taken, Upstream, open_release, package_above, with_absolute_imports


@dataclass
class _Parent:
    """A modeling file of transformers, and what is taken of it.

    Attributes:
        needed: names of the file, those of its imports too.
        new_names: those of them that get another name.
    """

    path: str
    written: Module
    names: Names
    needed: dict[str, None] = field(default_factory=dict[str, None])
    new_names: dict[str, str] = field(default_factory=dict[str, str])

    def defines(self, name: str) -> bool:
        return any(name in block.binds for block in self.written if not block.is_import)

    def meaning(self, name: str) -> str:
        """What a name of the file refers to, as a full name."""
        return self.names.imported().get(name) or f"{_module(self.path)}.{name}"

    def need(self, name: str) -> None:
        """Adds a name, and those that its code refers to."""
        pending = [name]
        while pending:
            current = pending.pop()
            blocks = [block for block in self.written if current in block.binds and "__all__" not in block.binds]
            if blocks and current not in self.needed:
                self.needed[current] = None
                pending += [used for block in blocks for node in block.statements for used in references(node)]

    def bind(self, bound: dict[str, str]) -> None:
        """Binds the names that are needed, those that are bound to something else by new names."""
        model = self.path.rpartition("modeling_")[2].removesuffix(".py")
        for name in self.needed:
            if bound.get(name, self.meaning(name)) != self.meaning(name):
                of_class = f"Of{model.title().replace('_', '')}"
                self.new_names[name] = name + (of_class if name[:1].isupper() else f"_of_{model}")
            bound[self.new_names.get(name, name)] = self.meaning(name)

    def imports(self, bound: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """What the definitions import by names that are not bound, as `("from torch import", "nn")`."""
        for node in (node for node in self.written.statements if isinstance(node, ast.Import | ast.ImportFrom)):
            start = "import"
            if isinstance(node, ast.ImportFrom):
                base = package_above(_module(self.path).rpartition(".")[0], node.level) if node.level else []
                start = f"from {'.'.join([*base, *filter(None, [node.module])])} import"
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                new = self.new_names.get(name, name)
                if name in self.needed and bound.get(new) != self.meaning(name):
                    yield start, f"{alias.name} as {new}" if alias.asname or new != name else alias.name

    def definitions(self) -> Iterator[Block]:
        """What is taken, with its new names and absolute imports."""
        for block in self.written:
            if not block.is_import and not self.needed.keys().isdisjoint(block.binds):
                text = _with_names(block, self._new_name)
                yield Block(with_absolute_imports(text, _module(self.path), self.path, kept=0))

    def _new_name(self, node: ast.AST) -> str | None:
        """The new name of what a node refers to, or defines for the module, if it gets one."""
        if isinstance(node, ast.Name):
            return None if "meaning" in vars(node) else self.new_names.get(node.id)  # marked: a local name
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.col_offset == 0:
            return self.new_names.get(node.name)
        return None


@dataclass
class _Library:
    """The modeling files of a release that definitions are taken of, by path."""

    release: Release
    parents: dict[str, _Parent] = field(default_factory=dict[str, _Parent])

    def find(self, meaning: str) -> tuple[_Parent, str] | None:
        """The file and the name of the definition that a full name such as `transformers.Qwen2Model` refers to."""
        package, _, name = meaning.rpartition(".")
        root, _, folder = package.replace(".", "/").partition("/")
        is_of_models = not folder or (folder.startswith("models/") and not folder.startswith("models/auto"))
        if root != "transformers" or not is_of_models:
            return None
        paths = [f"{folder}.py"]
        if "modeling_" not in folder:  # exported by a package
            paths = [path for path in self.release.defining(name) if path.startswith(folder)]
            paths = [path for path in paths if f'"{name}"' in (self.release.read(path) or "")]
        parent = next((parent for parent in map(self._parent, paths) if parent.defines(name)), None)
        return (parent, name) if parent else None

    def _parent(self, path: str) -> _Parent:
        if path not in self.parents:
            written, package = source.parse(self.release.read(path) or "", path), _module(path).rpartition(".")[0]
            names = Names(written.statements, lambda level: package_above(package, level))
            self.parents[path] = _Parent(path, written, names)
        return self.parents[path]


def with_inherited(module: Module, upstream: Upstream) -> tuple[Module, Upstream]:
    """A file on disk with the definitions of transformers' modeling files that it names, and what is then known of it. Both
    unchanged where it names none, and for files of transformers."""
    names = Names(module.statements, upstream.base_of)
    is_of_release = upstream.version is not None or upstream.module.startswith("transformers.")
    if is_of_release or not any(meaning.startswith("transformers.") for meaning in names.imported().values()):
        return module, upstream
    library = _Library(open_release())
    in_code = {name for block in module if not block.is_import for name in block.binds}  # an import in a `try`, too
    uses: dict[ast.AST, tuple[_Parent, str]] = {}
    for node in (node for block in module if not block.is_import for node in block.nodes):
        is_read = isinstance(getattr(node, "ctx", None), ast.Load)
        is_name = isinstance(node, ast.Name | ast.Attribute) and is_read and base_name(node) not in in_code
        if is_name and (found := library.find(names.resolve(node) or "")):
            uses[node] = found
    if not uses:
        return module, upstream
    given: dict[str, str] = {}
    for name in (name for block in module for name in block.binds):
        found = library.find(names.resolve(ast.Name(name)) or "")
        given[name] = found[0].meaning(found[1]) if found else names.resolve(ast.Name(name)) or "several things"
    for parent, name in uses.values():
        parent.need(name)
    bound, parents = dict(given), [parent for parent in library.parents.values() if parent.needed]
    for parent in parents:
        parent.bind(bound)

    def new_name(node: ast.AST) -> str | None:
        parent, name = uses.get(node, (None, ""))
        return parent.new_names.get(name, name) if parent else None

    definitions = {parent.meaning(name) for parent in parents for name in parent.needed if parent.defines(name)}
    kept = {name for name, meaning in given.items() if meaning not in definitions}
    blocks = [emit.with_used_names(b, kept) if b.is_import else b.with_text(_with_names(b, new_name)) for b in module]
    own = [block for block in blocks if block is not None]
    start = next((i for i, block in enumerate(own) if not (block.is_import or block.is_docstring)), len(own))
    taken = [block for parent in parents for block in parent.definitions()]
    licences = [emit.without_banner(parent.written.header).strip() for parent in parents]
    header = "".join([*(f"{licence}\n\n" for licence in dict.fromkeys(licences) if licence), module.header])
    merged = [*_sorted_imports([*own[:start], *_imports(parents, given)]), *taken, *own[start:]]
    text = replace(module, header=header, blocks=tuple(merged)).text
    return source.parse(text, module.path), _with_origin(upstream, text, library.release, parents)


def _imports(parents: list[_Parent], bound: Mapping[str, str]) -> Iterator[Block]:
    """The imports that definitions need, one for each module."""
    lines: dict[str, dict[str, None]] = {}
    for start, name in (entry for parent in parents for entry in parent.imports(bound)):
        lines.setdefault(f"{start} {name}" if start == "import" else start, {})[name] = None
    for start, imported in lines.items():
        plain = start.startswith("import ")
        yield Block(format_code(start if plain else f"{start} {', '.join(imported)}"))


def _sorted_imports(blocks: list[Block]) -> Iterator[Block]:
    """The docstring and the imports of a file as isort puts them, its sections apart."""
    first = [block for block in blocks if block.is_docstring or emit.is_future(block)]
    section = 0
    yield from first
    for block in sorted((block for block in blocks if block not in first), key=emit.import_place):
        gap, section = "\n" * (emit.import_place(block)[0] != section), emit.import_place(block)[0]
        yield block.with_text(gap + block.text.lstrip("\n"))


def _with_origin(upstream: Upstream, text: str, release: Release, parents: list[_Parent]) -> Upstream:
    """What is known of a file whose merged text has these parents: their hashes, names and configurations."""
    taken: list[Taken] = []
    configs = dict(upstream.configs)
    for parent in parents:
        digest = hashlib.sha256((release.read(parent.path) or "").encode()).hexdigest()
        names = (parent.new_names.get(name, name) for name in parent.needed if parent.defines(name))
        taken.append(Taken(f"transformers/{parent.path}", release.version, digest, frozenset(names)))
        path = parent.path.replace("modeling_", "configuration_", 1)
        configs = read_configs(release.read(path) or "", path) | configs
    own = f"configuration_{upstream.model}.py"
    if own in upstream.siblings:
        configs |= read_configs(upstream.siblings[own], own, configs)
    siblings = upstream.siblings | {upstream.merged_file: text}
    return replace(upstream, taken=tuple(taken), configs=configs, siblings=siblings)


def _module(path: str) -> str:
    """The full name of a module of transformers, by its path."""
    return f"transformers/{path}".removesuffix(".py").replace("/", ".")


def _with_names(block: Block, new_name: Callable[[ast.AST], str | None]) -> str:
    """The text of a block in which nodes have the names that `new_name` gives; in its place stays what is not where `ast`
    says, in an f-string of Python 3.11."""
    lines = block.text.encode().split(b"\n")
    edits: set[tuple[int, int, bytes, bytes]] = set()
    for node in block.nodes:
        if (new := new_name(node)) is not None and isinstance(node, ast.expr | ast.ClassDef | ast.FunctionDef):
            old = (ast.unparse(node) if isinstance(node, ast.expr) else node.name).encode()
            start = lines[node.lineno - 1].find(old, node.col_offset)
            if isinstance(node, ast.expr) and node.end_lineno != node.lineno:
                raise ConfigError(
                    f"{block.where}: `{ast.unparse(node)}` goes over two lines. To fix: write it in one."
                )
            if start == node.col_offset or not isinstance(node, ast.expr):
                edits.add((node.lineno - 1, start, old, new.encode()))
    for line, start, old, new in sorted(edits, reverse=True):
        lines[line] = lines[line][:start] + new + lines[line][start + len(old) :]
    return b"\n".join(lines).decode()
