"""A hash of the code that a process has run, of the sources as they are now: equal as long as a proof would run the same code.

A module is divided into units: each function and method; each constant; each class without its methods' code; functions that Triton
compiles; and the statements that remain. A proof depends on

    the functions that it called (`executed_code.py`)
    the classes whose methods these are
    the constants, classes and compiled functions whose names any of these mentions, in whatever module they are
    the remaining statements of every module that was imported, what they import for others (`ops.py`), and which modules they
    import that are not among these

and on where the names that they mention are imported from. So an edit of another function, a new one, comments, docstrings and the
order of definitions without decorators change no hash. Not noticed: a new function by the name of a builtin, and a constant that is
read by a text alone (`getattr(module, "LIMIT")`). Sources are parsed, not imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchgen import executed_code
from patchgen.runtime.code_hash import short_hash, symbol_hash, without_docstrings

ROOT = Path(__file__).parents[2]
"""The folder of the package whose sources are read."""


class Unit:
    """A part of a module.

    Args:
        statements: its code; docstrings are removed from it.
        imports: the names that its module imports -> where from.
        for_others: those among them that other modules read here, used or not.
    """

    def __init__(
        self, statements: Sequence[ast.stmt], imports: Mapping[str, str], for_others: Iterable[str] = ()
    ) -> None:
        self.statements, self._imports, self._for_others = list(statements), imports, frozenset(for_others)

    @functools.cached_property
    def hash(self) -> str:
        """Of its code, and of where the names that it uses are imported from."""
        tree = without_docstrings(ast.Module(self.statements, type_ignores=[]))
        variables = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used = (variables | self._for_others) & self._imports.keys()
        origins = [f"{name}={self._imports[name]}" for name in sorted(used)]
        return short_hash(*map(symbol_hash, tree.body), *origins)

    @functools.cached_property
    def mentions(self) -> frozenset[str]:
        """The names in it, of variables and attributes, and those by which other modules know them."""
        nodes = [node for statement in self.statements for node in ast.walk(statement)]
        variables = {node.id for node in nodes if isinstance(node, ast.Name)}
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        imported = {self._imports[name] for name in variables & self._imports.keys()}
        imported |= {node.name for node in nodes if isinstance(node, ast.alias)}
        return frozenset(variables | attributes | {name.rpartition(".")[2] for name in imported})


@dataclass(frozen=True)
class Module:
    """The units of a module by their names in it.

    Attributes:
        rest: the statements that are no unit.
        named: constants, classes and functions that are compiled from their source: what a mention of their names needs.
        imports: the names that it imports -> where from.
    """

    rest: Unit
    functions: dict[str, Unit]
    named: dict[str, Unit]
    imports: dict[str, str]


def hash_of(functions: Iterable[str]) -> str:
    """The hash of what was run, `executed_code.functions()`, in the sources of now. A function that is gone changes it."""
    hashes: set[str] = set()
    names: set[str] = set()
    entries = list(_expanded(functions))
    for module_name, entry in entries:
        module = _module(module_name)
        unit = module and (module.functions.get(entry) if entry else module.rest)
        if module is None or unit is None:
            hashes.add(f"{module_name}:{entry} is gone")
            continue
        hashes.add(f"{module_name}:{entry} {unit.hash}")
        names |= unit.mentions
        for owner in itertools.accumulate(entry.split(".")[:-1], "{}.{}".format):  # the classes around a method
            hashes.add(f"{module_name}:class {owner} {module.named[owner].hash}")
            names |= module.named[owner].mentions
    modules = frozenset(module for module, _ in entries)
    hashes |= {f"{name} is new" for name in _imported_by(modules) - modules}
    return short_hash(*sorted(hashes | _of_names(names, _named(modules), _aliases(modules))))


def _expanded(functions: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Module and function of each entry; the remaining statements of a module as "", and `*` as all that it has."""
    for module_name, _, entry in (name.partition(":") for name in functions):
        if entry != executed_code.ALL:
            yield module_name, entry
            continue
        yield module_name, ""
        module = _module(module_name)
        for name in module.functions if module is not None else ():
            yield module_name, name


def _of_names(
    names: set[str], table: Mapping[str, list[tuple[str, Unit]]], aliases: Mapping[str, set[str]]
) -> set[str]:
    """The units that these names can mean, and those that the names in these can."""
    found: set[str] = set()
    waiting, seen = set(names), set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= aliases.get(name, set()) - seen
        for place, unit in table.get(name, ()):
            found.add(f"{place} {unit.hash}")
            waiting |= unit.mentions - seen
    return found


@functools.cache
def _named(module_names: frozenset[str]) -> dict[str, list[tuple[str, Unit]]]:
    """What a name can mean in any of these modules: its place, and the unit."""
    table: dict[str, list[tuple[str, Unit]]] = {}
    for module_name in sorted(module_names):
        module = _module(module_name)
        for name, unit in module.named.items() if module is not None else ():
            table.setdefault(name.rpartition(".")[2], []).append((f"{module_name}:{name}", unit))
    return table


@functools.cache
def _aliases(module_names: frozenset[str]) -> dict[str, set[str]]:
    """The names by which these modules import something as another -> the names that it has where it is defined."""
    found: dict[str, set[str]] = {}
    for module_name in module_names:
        module = _module(module_name)
        for name, origin in module.imports.items() if module is not None else ():
            if (defined := origin.rpartition(".")[2]) != name:
                found.setdefault(name, set()).add(defined)
    return found


@functools.cache
def _imported_by(module_names: frozenset[str]) -> frozenset[str]:
    """The modules that these import at their top, of those that are recorded."""
    modules = [module for name in module_names if (module := _module(name)) is not None]
    origins = {origin for module in modules for origin in module.imports.values()}
    candidates = origins | {origin.rpartition(".")[0] for origin in origins}
    return frozenset(name for name in candidates if executed_code.is_recorded(name) and _module(name) is not None)


@functools.cache
def _module(name: str) -> Module | None:
    """The units of a module; None if it is gone."""
    base = ROOT.joinpath(*name.split(".")[1:])
    path = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
    if path is None:
        return None
    return read(path.read_text(encoding="utf-8"), name, is_package=path.name == "__init__.py")


# ---------------------------------------------------------------------------------------------------- units


def read(text: str, name: str, *, is_package: bool = False) -> Module:
    """The units of a module's source."""
    tree = ast.parse(text)
    imports = _imports(tree, name if is_package else name.rpartition(".")[0])
    functions, named = dict[str, Unit](), dict[str, Unit]()
    rest: list[ast.stmt] = []
    for qualified, function in executed_code.units(tree):
        units = named if executed_code.is_read_as_source(function) else functions
        before = units[qualified].statements if qualified in units else []  # `_` of registered functions, setters
        units[qualified] = Unit([*before, function], imports)
        if function.decorator_list:  # called when the module is imported, in this order
            rest += map(ast.Expr, (ast.Name(f"def {qualified}"), *function.decorator_list))
    for statement in _executed(tree.body):
        if _is_text(statement):
            continue
        if isinstance(statement, ast.ClassDef):
            named |= _classes(statement, imports)
        elif target := _constant(statement):
            before = named[target].statements if target in named else []
            named[target] = Unit([*before, statement], imports)
        elif not isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef):
            rest.append(statement)
    own = functions.keys() | named.keys()
    rest += [
        ast.Expr(ast.Name(f"own {name}")) for name in sorted(own & imports.keys())
    ]  # in place of what was imported
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - own
    listed = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} if "__all__" in named else set()
    for_others = {
        name for name in imports if executed_code.is_recorded(imports[name]) and (name not in used or name in listed)
    }
    return Module(Unit(rest, imports, for_others), functions, named, imports)


def _classes(node: ast.ClassDef, imports: dict[str, str], prefix: str = "") -> dict[str, Unit]:
    """A class and those in it: bases, decorators, fields, and the names of methods, without their code."""
    found: dict[str, Unit] = {}
    body: list[ast.stmt] = []
    for statement in node.body:
        if _is_text(statement):
            continue
        if isinstance(statement, ast.ClassDef):
            found |= _classes(statement, imports, f"{prefix}{node.name}.")
            body.append(ast.Expr(ast.Name(statement.name)))
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            body.append(ast.Expr(ast.Name(f"def {statement.name}")))  # a text alone could be taken for a docstring
        else:
            body.append(statement)
    shell = ast.ClassDef(node.name, node.bases, node.keywords, body, node.decorator_list)
    return {**found, prefix + node.name: Unit([shell], imports)}


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring, of a module, a class or a constant."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _constant(statement: ast.stmt) -> str | None:
    """The name that a statement gives a value, if that is all it does."""
    if (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
    ):
        return statement.targets[0].id
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    return None


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module without those that only a type checker reads."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            yield from statement.orelse
        else:
            yield statement


def _imports(tree: ast.Module, package: str) -> dict[str, str]:
    """The names that a module imports at its top -> where from."""
    found: dict[str, str] = {}
    for node in _executed(tree.body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
    return found
