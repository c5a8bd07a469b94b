"""Where the nodes of a block's libcst tree stand, so that what a reader found with `ast` is found again, and one within another."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
# What needs parentheses of its own beside an operator, and what has none only where the place gives them.
WEAK = cst.IfExp | cst.Lambda | cst.NamedExpr
BARE = cst.Tuple | cst.GeneratorExp
PLACE = "_place_of_an_expression_"


@dataclass(frozen=True)
class Places:
    """The nodes of a block's libcst tree by the bytes that they span, as `ast` tells them."""

    tree: cst.Module
    statements: dict[int, Statement] = field(default_factory=dict)  # alone on their lines, by where they begin
    elifs: set[cst.If] = field(default_factory=set)  # those of them that nothing can be put beside
    imports: dict[int, cst.ImportFrom] = field(default_factory=dict)
    expressions: dict[tuple[int, int], cst.BaseExpression] = field(default_factory=dict)


@functools.lru_cache(maxsize=64)
def places(text: str) -> Places:
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    found = Places(wrapper.module)
    spans = {node: (at.start, at.start + at.length) for node, at in wrapper.resolve(ByteSpanPositionProvider).items()}
    for node, (start, end) in spans.items():
        match node:
            case cst.SimpleStatementLine(body=[_]) | cst.BaseCompoundStatement():
                found.statements[start] = node
            case cst.ImportFrom():
                found.imports[start] = node
            case cst.Tuple(lpar=[*_, left], rpar=[right, *_]) | cst.GeneratorExp(lpar=[*_, left], rpar=[right, *_]):
                found.expressions[spans[left][0], spans[right][1]] = node
            case cst.BaseExpression():
                found.expressions[start, end] = node
        match node:
            case cst.If(orelse=cst.If() as other):
                found.elifs.add(other)
            case cst.Call(func=func, args=[cst.Arg(value=cst.GeneratorExp(lpar=[]) as alone)]):
                # `ast` counts the parentheses of the call to the generator
                above = spans[func.rpar[-1]][1] if func.rpar else spans[func][1]
                found.expressions[text.encode().index(b"(", above), end] = alone
    return found


def below(node: cst.CSTNode) -> list[cst.CSTNode]:
    return [inner for child in node.children for inner in (child, *below(child))]


def code_of(node: cst.CSTNode) -> str:
    return cst.Module(body=[]).code_for_node(node)


def around(before: str, after: str, old: cst.BaseExpression) -> cst.BaseExpression:
    """A parsed expression within other code, as it is: parsed again it could fall apart where its lines end."""
    code = cst.parse_expression(f"{before}{PLACE}{after}")
    nodes = [code, *below(code)]
    place = next(node for node in nodes if isinstance(node, cst.Name) and node.value == PLACE)
    is_argument = any(isinstance(node, cst.Arg) and node.value is place for node in nodes)
    if not (old.lpar or place.lpar) and (isinstance(old, BARE) or (isinstance(old, WEAK) and not is_argument)):
        old = parenthesised(old)
    return code.deep_replace(place, old.with_changes(lpar=[*place.lpar, *old.lpar], rpar=[*old.rpar, *place.rpar]))


def parenthesised(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(lpar=[cst.LeftParen(), *node.lpar], rpar=[*node.rpar, cst.RightParen()])
