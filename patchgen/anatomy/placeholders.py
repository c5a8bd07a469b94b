"""Recognises checks that there are as many placeholders among the tokens as features for them."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast

from patchgen.anatomy.classes import FunctionNode, base_name, parameter_names, stored, targets, walk
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import TOKENS

METADATA = ("device", "dtype")  # attributes of a tensor that tell nothing of its values


def made_of(function: FunctionNode, sources: set[str]) -> set[str]:
    """`sources`, and the names that a function computes from them, also those that it writes to in part or in place."""
    bound, names = list[tuple[set[str], set[str]]](), {*sources}
    for node in walk(function):
        match node:
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr() if node.value is not None:
                bound.append((_values(node.value), {*stored(*targets(node)), *map(base_name, targets(node))} - {""}))
            case ast.For(target, over) | ast.comprehension(target, over):
                bound.append((_values(over), {*stored(target)}))
            case ast.Expr(
                ast.Call(ast.Attribute() as changed) as call
            ):  # in place: `rows.index_copy_(0, where, features)`
                bound.append((_values(call), {base_name(changed)} - {"", "self"}))
    for _ in bound:
        names |= {name for read, written in bound if read & names for name in written}
    return names


def compares_features(method: FunctionNode, test: ast.expr) -> bool:
    """Whether a check reads placeholders and features: names computed from the tokens, and names that are not."""
    tokens = made_of(method, TOKENS & {*parameter_names(method)})
    outer = {name for node in walk(test) if (name := _owner(node)) not in local_names(method)}
    read = _values(test) - outer
    return bool(read & tokens) and bool(read - tokens)


def _owner(node: ast.AST) -> str:
    """The name that a node calls, or of which it reads an attribute; "" for other nodes."""
    match node:
        case ast.Call(ast.Name(name)) | ast.Attribute(ast.Name(name)):
            return name
    return ""


def _values(code: ast.expr) -> set[str]:
    """The names whose values an expression uses, rather than only their device, their dtype or whether they are None."""
    not_read: list[ast.expr] = []
    for node in walk(code):
        match node:
            case ast.Attribute(value, attribute) if attribute in METADATA:
                not_read.append(value)
            case ast.Compare(compared, [ast.Is() | ast.IsNot()]):
                not_read.append(compared)
    read = [node for node in walk(code) if isinstance(node, ast.Name) and node not in not_read]
    return {node.id for node in read} - {"self"}
