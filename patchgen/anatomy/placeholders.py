"""Checks that there are as many placeholders among the tokens as features for them."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast

from patchgen.anatomy.classes import FunctionNode, parameter_names, stored, targets, walk
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import TOKENS

FACTS = ("device", "dtype")  # of a tensor, that others are moved to


def compares_features(method: FunctionNode, test: ast.expr) -> bool:
    """Whether a check reads both what is computed from the tokens and what is not: placeholders and features."""
    tokens, bound = TOKENS & {*parameter_names(method)}, list[tuple[set[str], set[str]]]()
    for node in walk(method):
        match node:
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr() if node.value is not None:
                bound.append((_values(node.value), {*stored(*targets(node))}))
            case ast.For(target, over) | ast.comprehension(target, over):
                bound.append((_values(over), {*stored(target)}))
    for _ in bound:
        tokens |= {name for read, names in bound if read & tokens for name in names}
    outer = {name for node in walk(test) if (name := _owner(node)) not in local_names(method)}
    read = _values(test) - outer
    return bool(read & tokens) and bool(read - tokens)


def _owner(node: ast.AST) -> str:
    """The name that is called, or of which an attribute is read."""
    match node:
        case ast.Call(ast.Name(name)) | ast.Attribute(ast.Name(name)):
            return name
    return ""


def _values(code: ast.expr) -> set[str]:
    """The names whose values an expression computes with: not where they lie, of which dtype, and whether they are given."""
    facts: list[ast.expr] = []
    for node in walk(code):
        match node:
            case ast.Attribute(value, attribute) if attribute in FACTS:
                facts.append(value)
            case ast.Compare(compared, [ast.Is() | ast.IsNot()]):
                facts.append(compared)
    read = [node for node in walk(code) if isinstance(node, ast.Name) and node not in facts]
    return {node.id for node in read} - {"self"}
