"""Upstream's module with the statements mended that fail there, as the generated file has them.

    mended("transformers.models.llama4.modeling_llama4", (Mend("Llama4For....forward", "return A(x=y)", "return A(x=z)"),))

A model config says which (`MendUpstream` of `patchgen/passes/hand_edits.py`), `provenance.json` records it, and every comparison
with upstream gets this module from `GeneratedModel.upstream`: a class that only raises is no reference.
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
    """The installed upstream does not have the statement that was mended."""


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
    """A module beside the one of this name, with the same file and the mended statements; it is in `sys.modules`, too.

    Raises:
        MendError: the file has other code now.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for mend in mends:
        _apply(mend, tree, spec.origin)
    # Positions stay those of the file, which transformers and tracebacks read the source of classes from.
    code = compile(ast.fix_missing_locations(tree), spec.origin, "exec", dont_inherit=True)
    module = importlib.util.module_from_spec(_beside(spec))
    sys.modules[module.__name__] = module
    exec(code, vars(module))
    return module


def _beside(spec: ModuleSpec) -> ModuleSpec:
    """The spec of a file under another name in its package."""
    found = importlib.util.spec_from_file_location(f"{spec.name}_mended", spec.origin)
    assert found is not None, "a file of a package has a spec"
    return found


def _apply(mend: Mend, tree: ast.Module, path: str) -> None:
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
    if replacer.found != 1:
        raise MendError(
            f"{mend.target} of {path} should have `{mend.statement.splitlines()[0]} ...` once and has it {replacer.found} times: "
            "the model was generated from other code. To fix: install the release that its provenance.json names, or generate "
            "it again."
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
