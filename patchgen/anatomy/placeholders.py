"""Recognises checks that there are as many placeholders among the tokens as features for them."""

from __future__ import annotations

import ast

from patchgen.anatomy.classes import FunctionNode, parameter_names, walk
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import TOKENS
from patchgen.anatomy.sequence_loops import made_of, values_used


def compares_features(anatomy: Anatomy, method: FunctionNode, test: ast.expr) -> bool:
    """Whether a check reads placeholders and features: names computed from the tokens, and names that are not."""
    tokens = made_of(anatomy, method, TOKENS & {*parameter_names(method)})
    outer = {name for node in walk(test) if (name := _owner(node)) not in local_names(method)}
    read = {name for name in values_used(test) if name.isidentifier()} - outer
    return bool(read & tokens) and bool(read - tokens)


def _owner(node: ast.AST) -> str:
    """The name that a node calls, or of which it reads an attribute; "" for other nodes."""
    match node:
        case ast.Call(ast.Name(name)) | ast.Attribute(ast.Name(name)):
            return name
        case _:
            return ""
