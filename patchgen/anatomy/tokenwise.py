"""Whether code treats the rows of a tensor (the tokens) one by one.

A loss in chunks of tokens calls the head chunk by chunk, and fused experts call an activation, a gate or a norm on rows in
another order. Code that is not known to treat each row by itself is returned, so that passes can refuse it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence

from patchgen.anatomy.axes import Mixed, Value
from patchgen.anatomy.classes import base_name, is_in_place, loaded, stored
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.anatomy.row_reader import RowReader


def stored_names(node: ast.AST, among: Collection[str]) -> set[str]:
    """The names of `among` that code assigns or may change in place."""
    names: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute | ast.Subscript) and isinstance(child.ctx, ast.Store | ast.Del):
            names.add(base_name(child))
        elif isinstance(child, ast.Call) and is_in_place(child.func):
            names.add(base_name(child.func))
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):  # called for what it changes
            names |= set(loaded(child.value))
    return (names | set(stored(node))).intersection(among)


def mixing(
    body: Sequence[ast.stmt],
    tensors: Mapping[str, Value],
    owner: str,
    anatomy: Anatomy,
    known: Collection[str] = (),
    *,
    groups: bool = False,
) -> ast.AST | None:
    """The first piece of `body` that is not known to treat the tokens one by one; None if all of it does.

    Args:
        body: statements.
        tensors: the names of tensors with a row per token where the body begins, and their axes: "*." for any number.
        owner: the class whose `self` the body uses.
        anatomy: of the file, for the functions, methods and modules that the body calls.
        known: what else may be called, by full name: ".Attention", "torch.squeeze", "torch.Tensor.squeeze".
        groups: whether neighbouring rows may be merged into groups, which count as rows from there on.
    """
    try:
        rows_after(body, tensors, owner, anatomy, known, groups=groups)
    except Mixed as mixed:
        return mixed.node
    return None


def rows_after(
    body: Sequence[ast.stmt],
    tensors: Mapping[str, Value],
    owner: str,
    anatomy: Anatomy,
    known: Collection[str] = (),
    *,
    groups: bool = False,
) -> dict[str, Value]:
    """The axes of each name where `body` ends; the arguments are those of `mixing`, and what that returns is raised as Mixed."""
    local = {"self"} | local_names(ast.Module(list(body), [])) | set(tensors)
    reader = RowReader(anatomy, owner, local, tensors, known=known, groups=groups)
    reader.run(body)
    return reader.values


def mixing_member(anatomy: Anatomy, owner: str, attribute: str, *, fixed: bool) -> ast.AST | str | None:
    """The first piece of what `self.<attribute>(rows)` runs, in the class `owner`, that is not known to treat each row by
    itself, as code or text; None if all of it does. A `fixed` result depends on the rows alone, not on parameters."""
    method = ast.Attribute(ast.Name("self", ast.Load()), attribute, ast.Load())
    call = ast.Call(method, [ast.Name("rows", ast.Load())], [])
    try:
        RowReader(anatomy, owner, {"self", "rows"}, {"rows": "*."}, fixed=fixed).call_own(attribute, call)
    except Mixed as mixed:
        return mixed.reason
    return None
