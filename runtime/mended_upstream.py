"""Upstream's module with the statements mended that fail there, as the generated file has them.

    mended("transformers.models.llama4.modeling_llama4", (Mend("Llama4For....forward", "return A(x=y)", "return A(x=z)"),))

A model config says which (`MendUpstream` of `patchgen/passes/hand_edits.py`), `provenance.json` records it, and every comparison
with upstream gets this module from `GeneratedModel.upstream`: a class that only raises is no reference. In a release whose method
has no such statement, nothing is mended and upstream's own module is the reference.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import EditRecord


class MendError(ValueError):
    """The installed upstream does not have the class or method that was mended, or has the statement more than once."""


@dataclass(frozen=True)
class Mend:
    """A statement of `Class.method` in upstream, and the code in its place."""

    target: str
    statement: str
    code: str


def mends_of(edits: Sequence[EditRecord]) -> tuple[Mend, ...]:
    """The mends among the hand edits of a `provenance.json`."""
    return tuple(
        Mend(edit["target"], edit["mend"]["statement"], edit["mend"]["code"]) for edit in edits if "mend" in edit
    )


@functools.cache
def mended(name: str, mends: tuple[Mend, ...]) -> ModuleType:
    """A module beside the one of this name, with the same file and the mended statements; it is in `sys.modules`, too. The one of
    this name itself, where its file has none of the statements.

    Raises:
        MendError: a method is gone, or has its statement more than once.
    """
    tree, path, applied = _mended_tree(name, mends)
    if not applied:
        return importlib.import_module(name)
    spec = _beside(name, path)
    # Positions stay those of the file, which transformers and tracebacks read the source of classes from.
    code = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        exec(code, vars(module))
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def applied_mends(name: str, mends: tuple[Mend, ...]) -> tuple[Mend, ...]:
    """Those whose statement the module of this name has; raises as `mended` does."""
    return _mended_tree(name, mends)[2] if mends else ()


def _mended_tree(name: str, mends: tuple[Mend, ...]) -> tuple[ast.Module, str, tuple[Mend, ...]]:
    """The mended syntax tree of a module, its path, and the mends that it needed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return tree, spec.origin, tuple(mend for mend in mends if _apply(mend, tree, spec.origin))


def _beside(name: str, path: str) -> ModuleSpec:
    """The spec of a file under another name in its package."""
    found = importlib.util.spec_from_file_location(f"{name}_mended", path)
    assert found is not None, "a file of a package has a spec"
    return found


def _apply(mend: Mend, tree: ast.Module, path: str) -> bool:
    """Replaces the statement in place; whether it was there."""
    name, _, method = mend.target.partition(".")
    functions = [
        member
        for block in tree.body
        if isinstance(block, ast.ClassDef) and block.name == name
        for member in block.body
        if isinstance(member, ast.FunctionDef) and member.name == method
    ]
    replacer = _Replacer(mend)
    for function in functions:
        replacer.visit(function)
    if functions and replacer.found <= 1:
        return replacer.found == 1
    problem = (
        f"has `{mend.statement.splitlines()[0]} ...` {replacer.found} times, and one was mended"
        if functions
        else "does not exist, and was mended"
    )
    raise MendError(
        f"{mend.target} of {path} {problem}: the model was generated from other code. To fix: install the release that its "
        "provenance.json names, or generate it again."
    )


class _Replacer(ast.NodeTransformer):
    def __init__(self, mend: Mend) -> None:
        (statement,) = ast.parse(mend.statement).body
        self._statement, self._code = ast.dump(statement), ast.parse(mend.code).body
        self.found = 0

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        if not isinstance(node, ast.stmt) or ast.dump(node) != self._statement:
            return self.generic_visit(node)
        self.found += 1
        for statement in self._code:
            for part in ast.walk(statement):
                ast.copy_location(part, node)
        return self._code
