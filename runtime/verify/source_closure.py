"""What code generation depends on, as a hash: the modules that a module imports, and those that these import.

Imports count at the top of a file or in a function, and so do modules named in a string, to be imported later. Comments and
docstrings do not, so they can change without making a result stale. Files are parsed, not imported. What
a proof depends on is observed instead (`executed_code.py`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from patchgen.runtime.code_hash import short_hash, symbol_hash, without_docstrings

PACKAGE = "patchgen"
RUNTIME = (f"{PACKAGE}.runtime", f"{PACKAGE}.kernels")
ROOT = Path(__file__).parents[2]
"""The folder of the package whose sources are read."""


# ------------------------------------------------------------------------------------------------- closures


def closure(
    entry_modules: Iterable[str], packages: tuple[str, ...], *, without: tuple[str, ...] = ()
) -> dict[str, Path]:
    """The modules that `entry_modules` import inside `packages`, themselves included, with their files; by name."""
    files: dict[str, Path] = {}
    waiting = [(name, _file_of(name)) for name in entry_modules]
    while waiting:
        name, path = waiting.pop()
        if path is None:
            raise FileNotFoundError(f"There is no module {name}, which records depend on.")
        if name in files:
            continue
        files[name] = path
        for imported_name in imported(path.read_text(encoding="utf-8"), name, is_package=path.name == "__init__.py"):
            belongs = _is_in(imported_name, packages) and not _is_in(imported_name, without)
            if belongs and imported_name not in files and (file := _file_of(imported_name)) is not None:
                waiting.append((imported_name, file))
    return dict(sorted(files.items()))


@functools.cache
def imported(text: str, name: str, *, is_package: bool) -> frozenset[str]:
    """The modules that a source may import; names imported from modules are listed as if they were modules."""
    names: set[str] = set()
    for node in _executed_nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _imported_module(node, name, is_package)
            names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{PACKAGE}."):
            names.add(node.value.partition(":")[0])
    return frozenset(names)


def _executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those that only a type checker reads."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.orelse:
                yield from _executed_nodes(statement)
        else:
            yield from _executed_nodes(child)


def _imported_module(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    package = name if is_package else name.rpartition(".")[0]
    return importlib.util.resolve_name("." * node.level + (node.module or ""), package)


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _file_of(name: str) -> Path | None:
    base = ROOT.joinpath(*name.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


# --------------------------------------------------------------------------------------------------- hashes


def hash_of(files: Iterable[Path]) -> str:
    """A hash of the code in files, without comments, formatting and docstrings."""
    return short_hash(*(_code_hash(path.read_text(encoding="utf-8")) for path in files))


@functools.cache
def _code_hash(text: str) -> str:
    return symbol_hash(without_docstrings(ast.parse(text)))
