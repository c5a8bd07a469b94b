"""Hashes of code that are independent of comments, formatting, and the Python release."""

from __future__ import annotations

import ast
import hashlib


def symbol_hash(node: ast.AST) -> str:
    """A hash of a class or function."""
    return hashlib.sha256(_structure(node).encode()).hexdigest()[:16]


def _structure(value: object) -> str:
    """A node as text; unlike `ast.dump` independent of the Python release.

    Empty fields are left out (`type_params` came with 3.12), and adjacent string parts of an f-string are joined (their number
    differs between releases).
    """
    if isinstance(value, list):
        return "[" + ",".join(map(_structure, value)) + "]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [(name, getattr(value, name, None)) for name in value._fields if name != "kind"]
    if isinstance(value, ast.JoinedStr):
        fields = [("values", _joined(value.values))]
    present = [f"{name}={_structure(field)}" for name, field in fields if field is not None and field != []]
    return f"{type(value).__name__}({','.join(present)})"


def _joined(pieces: list[ast.expr]) -> list[ast.expr]:
    joined: list[ast.expr] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, ast.Constant) and isinstance(last, ast.Constant):
            joined[-1] = ast.Constant(f"{last.value}{piece.value}")
        elif not (isinstance(piece, ast.Constant) and piece.value == ""):
            joined.append(piece)
    return joined


def short_hash(*texts: str) -> str:
    """16 digits of a hash of texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:16]


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Removes docstrings from the tree, in place; returns it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree
