"""What the names of a file refer to, by its imports, definitions and scopes."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Callable, Container, Iterator, Sequence

from patchgen.anatomy.classes import FunctionNode, calls, mentions, own_attribute, stored, walk
from patchgen.source import bound_names

CONFIG = "config"  # transformers' name for the parameter, and the attribute of models, that is a configuration


def is_of_config(value: ast.AST) -> bool:
    """Whether an expression is `config`, `self.config` or part of one: by transformers' contract no tensor."""
    match value:
        case ast.Name(name):
            return name == CONFIG
        case ast.Attribute(ast.Name("self"), name):
            return name == CONFIG
        case ast.Attribute(part) | ast.Subscript(part) | ast.Call(ast.Attribute(part, "get_text_config")):
            return is_of_config(part)
    return False


class Names:
    """The module-level names of one file; its relative imports start from the packages that `base_of` says (`Upstream.base_of`).

    Attributes:
        functions: name -> module-level function, in the branches of an `if` or `try` too; none that a decorator wraps
            (`is_wrapped`).
        origins: name -> the full names that imports bind to it, usually one.
    """

    def __init__(self, nodes: Sequence[ast.stmt], base_of: Callable[[int], list[str]] = lambda level: []) -> None:
        self._known: dict[str, str | None] = {}
        self.origins: dict[str, list[str]] = {}
        self._base_of = base_of
        leaves = [*_leaves(nodes)]
        for leaf in leaves:
            for name, meaning in self.imports(leaf):
                self.origins.setdefault(name, []).append(meaning)
        for statement in nodes:
            for name, meaning in self._bindings(statement):
                self._known[name] = meaning if self._known.get(name, meaning) == meaning else None
        for function in (node for statement in nodes for node in walk(statement) if isinstance(node, FunctionNode)):
            self._mark_local(function)
        defined = {node.name: node for node in leaves if isinstance(node, FunctionNode)}
        self.functions = {name: node for name, node in defined.items() if not self.is_wrapped(node)}

    def is_wrapped(self, function: FunctionNode) -> bool:
        """Whether a decorator that is not transformers', torch's or a builtin may wrap the function in other code."""
        meanings = [self.resolve(getattr(node, "func", node)) or "" for node in function.decorator_list]
        return not all(meaning.startswith(("transformers.", "torch.", "builtins.")) for meaning in meanings)

    def imported(self) -> dict[str, str]:
        """Name -> full name, for each name of the module that refers to something outside the file."""
        return {name: meaning for name, meaning in self._known.items() if meaning and not meaning.startswith(".")}

    def resolve(self, node: ast.AST | None, local: Container[str] = ()) -> str | None:
        """The full name of what an expression of names and dots refers to, anywhere in the file: "torch.nn.functional.linear" for
        `F.linear`; ".rotate_half" for what this file defines; None for a local name, a name that is bound to several things and
        other expressions.

        What functions of the file bind is known without `local`: further names that enclosing scopes bind (`local_names`).
        """
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value, local)
            return f"{owner}.{node.attr}" if owner else None
        if not isinstance(node, ast.Name):
            return None
        if "meaning" in vars(node):
            return vars(node)["meaning"]
        if node.id in local:
            return None
        if node.id in self._known:
            return self._known[node.id]
        return f"builtins.{node.id}" if hasattr(builtins, node.id) and "*" not in self._known else None

    def here(self, node: ast.AST | None, local: Container[str] = ()) -> str:
        """The name, in this file, of what it defines and an expression refers to; "" for anything else."""
        meaning = self.resolve(node, local) or ""
        return meaning[1:] if meaning.startswith(".") else ""

    def is_upstream(self, node: ast.AST | None, name: str, local: Container[str] = ()) -> bool:
        """Whether an expression, or the function that it calls, is something of this name in transformers."""
        meaning = self.resolve(node.func if isinstance(node, ast.Call) else node, local) or ""
        return meaning.startswith("transformers.") and meaning.endswith(f".{name}")

    def operation(self, call: ast.Call) -> str:
        """The last name of a torch function, or of a method of a computed value (a tensor's); "" for other calls."""
        meaning = self.resolve(call.func) or ""
        if meaning or not isinstance(call.func, ast.Attribute):
            return meaning.rpartition(".")[2] if meaning.startswith("torch.") else ""
        return "" if own_attribute(call.func) else call.func.attr

    def operations(self, *code: ast.AST) -> set[str]:
        """The operations that code calls: {"topk", "softmax", ...}."""
        return set(map(self.operation, calls(*code))) - {""}

    def imports(self, statement: ast.AST) -> Iterator[tuple[str, str]]:
        """(name, full name) for each name that an import statement binds, in any scope; nothing for other statements."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from self._bindings(statement)

    def _mark_local(self, function: FunctionNode) -> None:
        """Marks each name node in a function that is local: with the full name that an import in it binds, else None."""
        inside = [node for statement in function.body for node in walk(statement)]
        imported = dict(binding for node in inside for binding in self.imports(node))
        local = dict.fromkeys(local_names(function)) | imported | dict.fromkeys(stored(function))
        for node in inside:
            if isinstance(node, ast.Name) and node.id in local:
                vars(node)["meaning"] = local[node.id]

    def _bindings(self, statement: ast.stmt) -> Iterator[tuple[str, str]]:
        """(name, full name) for each name that a module-level statement binds."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                first = alias.name.split(".")[0]
                yield alias.asname or first, alias.name if alias.asname else first
        elif isinstance(statement, ast.ImportFrom):
            base = self._base_of(statement.level) if statement.level else []
            for alias in statement.names:
                yield alias.asname or alias.name, ".".join([*base, *filter(None, [statement.module]), alias.name])
        elif isinstance(statement, ast.If | ast.Try | ast.For | ast.While | ast.With):
            inside = [binding for leaf in _leaves([statement]) for binding in self._bindings(leaf)]
            defined_here = {name for name, meaning in inside if meaning == f".{name}"}
            # Imported from a package where that is installed, else defined here: the definition says what both compute.
            yield from ((name, f".{name}" if name in defined_here else meaning) for name, meaning in inside)
            yield from ((name, f".{name}") for name in bound_names(statement) if name not in dict(inside))
        else:
            other = self.resolve(statement.value) if isinstance(statement, ast.Assign) else None  # an alias
            yield from ((name, other or f".{name}") for name in bound_names(statement))


@functools.lru_cache(maxsize=4096)
def local_names(function: ast.AST) -> frozenset[str]:
    """The names bound in a function or other code: by parameters, assignments, loops, definitions and imports."""
    names = set(stored(function))
    for node in walk(function):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ClassDef | FunctionNode | ast.Import | ast.ImportFrom) and node is not function:
            names |= set(bound_names(node))
    return frozenset(names)


def uses_name(node: ast.AST, name: str) -> bool:
    """Whether a name is read or bound anywhere in a node; attributes and keywords of that name do not count."""
    return mentions(node, name) or name in local_names(node)


def _leaves(nodes: Sequence[ast.AST]) -> Iterator[ast.stmt]:
    """The statements of the module's scope; instead of an `if`, `try`, `with` or loop, those inside it."""
    for node in nodes:
        if isinstance(node, ast.If | ast.Try | ast.For | ast.While | ast.With | ast.ExceptHandler):
            yield from _leaves([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt | ast.ExceptHandler)])
        elif isinstance(node, ast.stmt):
            yield node
