"""The symbols of a source file, down to methods and fields, compared without comments, docstrings and formatting."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from patchgen.anatomy.classes import FunctionNode
from patchgen.passes.hand_edits import content_hash
from patchgen.source import bound_names

OTHER = "(other statements)"
Definition = ast.ClassDef | FunctionNode


@dataclass(frozen=True)
class Symbol:
    """A function, a method, a field, a module's constant, or the head of a class: decorators, bases, what is no member.

    Attributes:
        nodes: its definitions; a property and its setter are one symbol.
        content: the nodes that decide whether it is unchanged.
        annotation: of a field; compared only if both sides have one, because a parameter of `__init__` that became a field may
            have gained it.
        class_node: for the head of a class, the whole class; its members are symbols themselves and no part of `content`.
    """

    name: str
    nodes: tuple[ast.AST, ...]
    content: tuple[ast.AST, ...]
    annotation: ast.expr | None = None
    class_node: ast.ClassDef | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """The hash of its content, without comments, docstrings and formatting."""
        return content_hash(*self.content)

    @property
    def line(self) -> int:
        return min((node.lineno for node in self.nodes if isinstance(node, ast.stmt | ast.expr | ast.arg)), default=0)

    def same_as(self, other: Symbol) -> bool:
        """Whether neither the content nor an annotation that both have differs."""
        annotations = [symbol.annotation for symbol in (self, other) if symbol.annotation is not None]
        annotation_differs = len(annotations) == 2 and content_hash(annotations[0]) != content_hash(annotations[1])
        return self.fingerprint == other.fingerprint and not annotation_differs

    def text(self, source: str, *, with_members: bool = False) -> str:
        """Its source, decorators included; of a class only the head, unless `with_members`."""
        lines = source.splitlines()
        nodes = (self.class_node,) if with_members and self.class_node is not None else self.nodes
        return "\n\n".join(filter(None, (_source_of(source, lines, node) for node in nodes)))


@functools.lru_cache(maxsize=1024)
def symbols_of(text: str, *, is_config: bool = False) -> Mapping[str, Symbol]:
    """`name -> symbol` of a file: "scale", "Layer", "Layer.forward", "LayerConfig.hidden_size".

    In a configuration, a parameter of `__init__` with a default is the same symbol as the field of its name.
    """
    return symbols_of_statements(ast.parse(text).body, is_config=is_config)


def symbols_of_statements(nodes: list[ast.stmt], *, is_config: bool) -> dict[str, Symbol]:
    """As `symbols_of`, for the statements of a parsed file."""
    symbols: dict[str, Symbol] = {}
    others: list[ast.stmt] = []
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            symbols.update((symbol.name, symbol) for symbol in _class_symbols(node, is_config))
        elif isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            continue
        elif names := bound_names(node):
            symbols.update(
                (name, _module_symbol(name, node, symbols.get(name))) for name in names if not _is_imported(node, name)
            )
        else:
            others.append(node)
    symbols.pop("__all__", None)
    return symbols | ({OTHER: Symbol(OTHER, tuple(others), tuple(others))} if others else {})


def _module_symbol(name: str, node: ast.stmt, earlier: Symbol | None) -> Symbol:
    """The symbol that a module-level statement binds: a function, a constant, or one of several in an `if` or `try`."""
    inside = [n for n in ast.walk(node) if isinstance(n, Definition) and n is not node and n.name == name]
    nodes = tuple(inside or [node])
    if isinstance(node, ast.AugAssign) and earlier is not None:
        nodes = (*earlier.nodes, node)
    return Symbol(name, nodes, nodes)


def _class_symbols(node: ast.ClassDef, is_config: bool) -> Iterator[Symbol]:
    members: dict[str, list[ast.stmt]] = {}
    others: list[ast.stmt] = []
    for statement in node.body:
        names = bound_names(statement)
        for name in names:
            members.setdefault(name, []).append(statement)
        if not names and not _is_docstring(statement) and not isinstance(statement, ast.Pass):
            others.append(statement)
    head = ast.ClassDef(node.name, node.bases, node.keywords, others or [ast.Pass()], node.decorator_list)
    head.lineno = node.lineno
    yield Symbol(node.name, (head,), (head,), class_node=node)
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    init = init if is_config else None
    for name, statements in members.items():
        yield _member_symbol(f"{node.name}.{name}", statements, init)
    for argument, default in _parameters_with_defaults(init) if init is not None else ():
        if argument.arg not in members:
            yield Symbol(f"{node.name}.{argument.arg}", (argument, default), (default,), argument.annotation)


def _member_symbol(name: str, statements: list[ast.stmt], init: ast.FunctionDef | None) -> Symbol:
    """A method or a field; `init` is the `__init__` of a configuration class."""
    nodes = tuple(statements)
    if len(nodes) == 1 and isinstance(nodes[0], ast.Assign | ast.AnnAssign):
        content = () if nodes[0].value is None else (nodes[0].value,)
        return Symbol(name, nodes, content, getattr(nodes[0], "annotation", None))
    return Symbol(name, nodes, (_without_defaults(init),) if init is not None and statements == [init] else nodes)


def _parameters_with_defaults(function: ast.FunctionDef) -> Iterator[tuple[ast.arg, ast.expr]]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    yield from zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from ((argument, default) for argument, default in keyword_only if default is not None)


def _without_defaults(init: ast.FunctionDef) -> ast.FunctionDef:
    """A copy of `__init__` without the parameters that have defaults, which are symbols of their own."""
    init = copy.deepcopy(init)
    with_default = {argument.arg for argument, _ in _parameters_with_defaults(init)}
    init.args.args = [argument for argument in init.args.args if argument.arg not in with_default]
    init.args.kwonlyargs = [argument for argument in init.args.kwonlyargs if argument.arg not in with_default]
    init.args.defaults, init.args.kw_defaults = [], [None] * len(init.args.kwonlyargs)
    return init


def _is_imported(node: ast.stmt, name: str) -> bool:
    """Whether a branch of an `if` or `try` imports the name."""
    if not isinstance(node, ast.If | ast.Try | ast.With):
        return False
    imports = (n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom))
    return any(name in bound_names(statement) for statement in imports)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _source_of(source: str, lines: list[str], node: ast.AST) -> str:
    if (
        isinstance(node, ast.ClassDef) and node.end_lineno is None
    ):  # the head of a class, which has no position in the source
        return ast.unparse(node)
    if not isinstance(node, ast.stmt):
        return ast.get_source_segment(source, node) or ast.unparse(node)
    start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return "\n".join(lines[start - 1 : node.end_lineno])
