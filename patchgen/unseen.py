"""What the source does not show: names that a star import brings, and names that are looked up by string."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.source import Block


def unseen_references(kept: Sequence[Block], has_dropped: bool) -> list[str]:
    """Remarks on names that are read in ways that the source does not show."""
    notes = []
    for block in kept:
        where = block.name or f"line {block.line}"
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                notes.append(f"{where}: `{ast.unparse(node)}` hides what it brings; unknown names are not looked for")
            elif has_dropped and _looks_up_by_string(node):
                notes.append(
                    f"{where} looks names up with `{ast.unparse(node)}`; one that was dropped is not seen here"
                )
    return list(dict.fromkeys(notes))


def _looks_up_by_string(node: ast.AST) -> bool:
    """`globals()[...]`, `globals().get(...)` or `sys.modules[__name__]`."""
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.value, ast.Call):
        return isinstance(node.value.func, ast.Name) and node.value.func.id == "globals"
    return isinstance(node, ast.Subscript) and ast.unparse(node) == "sys.modules[__name__]"
