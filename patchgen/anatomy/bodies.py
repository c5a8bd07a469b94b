"""Compares function bodies regardless of names: upstream uses one helper name for many bodies, so passes go by the body."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass

from patchgen.anatomy.classes import FunctionNode, own_attribute, parameter_names, stored


@dataclass(frozen=True)
class NormalForm:
    """A function without its own names. Functions of equal `text` compute the same in the same way, provided that their
    attributes, their defaults and the names that they do not bind mean the same."""

    text: str
    parameters: tuple[str, ...]  # the real names, in order
    attributes: tuple[str, ...]  # the real `self.<attribute>`s, in order of appearance


def normal_form(function: FunctionNode) -> NormalForm:
    """Renames parameters, locals and attributes of self by order of appearance; drops docstring, annotations and defaults."""
    renamer = _Renamer()
    parameters, args = parameter_names(function), function.args
    for name in [*parameters, *(arg.arg for arg in (args.vararg, args.kwarg) if arg)]:
        renamer.local(name)
    body = function.body[ast.get_docstring(function) is not None :]
    for name in (name for statement in body for name in stored(statement)):
        renamer.local(name)
    text = "\n".join(ast.unparse(renamer.visit(ast.parse(ast.unparse(statement)))) for statement in body)
    return NormalForm(f"({len(parameters)})\n{text}", tuple(parameters), tuple(renamer.attributes))


def form_of(source: str) -> str:
    """The normal form of a function given as source, for tables of known bodies."""
    function = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(function, FunctionNode)
    return normal_form(function).text


class _Renamer(ast.NodeTransformer):
    def __init__(self) -> None:
        self.locals: dict[str, str] = {"self": "self"}
        self.attributes: list[str] = []

    def local(self, name: str) -> str:
        return self.locals.setdefault(name, f"v{len(self.locals)}")

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.locals.get(node.id, node.id), node.ctx)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return self.visit(ast.Assign([node.target], node.value, lineno=node.lineno))

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        if own_attribute(node):
            if node.attr not in self.attributes:
                self.attributes.append(node.attr)
            return ast.Attribute(node.value, f"a{self.attributes.index(node.attr)}", node.ctx)
        self.generic_visit(node)
        return node
