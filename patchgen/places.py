"""The byte spans and parents of the nodes of a block's libcst tree, by which a node of `ast` is found in it."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from patchgen.errors import Missed

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Span = tuple[int, int]  # the first byte, and the one after the last
# Expressions that may need parentheses where they are inserted: WEAK ones anywhere but as an argument, BARE ones always.
WEAK = cst.IfExp | cst.Lambda | cst.NamedExpr
BARE = cst.Tuple | cst.GeneratorExp
PLACEHOLDER = "_place_of_an_expression_"


@dataclass(frozen=True)
class Places:
    """The nodes of a libcst tree by their byte spans, which are those of `ast`: statements and imports by the first byte."""

    tree: cst.Module
    # those that share their lines with no other
    statements: dict[int, Statement] = field(default_factory=dict[int, Statement])
    elifs: set[cst.If] = field(default_factory=set[cst.If])  # of `statements`; nothing can be inserted beside them
    imports: dict[int, cst.ImportFrom] = field(default_factory=dict[int, cst.ImportFrom])
    expressions: dict[Span, cst.BaseExpression] = field(default_factory=dict[Span, cst.BaseExpression])
    parents: dict[cst.CSTNode, cst.CSTNode | None] = field(default_factory=dict[cst.CSTNode, cst.CSTNode | None])

    def holders(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The ancestors of a node, innermost first."""
        while (holder := self.parents.get(node)) is not None:
            yield (node := holder)


@dataclass(frozen=True, eq=False)
class Part:
    """Lines of a block that are parsed and changed separately: a member of a class, what is above the members, or all."""

    start: int  # the offset of `text` in the block's bytes
    text: str
    before: str = ""  # what makes the text a valid module: `class _:` above it
    after: str = ""  # and a last member below it

    @functools.cached_property
    def places(self) -> Places:
        """The nodes of the part. Raises Missed if libcst cannot parse it separately."""
        try:
            return places(self.before + self.text + self.after)
        except cst.ParserSyntaxError as error:
            raise Missed("lines that libcst reads by themselves", self.text) from error

    def span(self, start: int, end: int) -> Span:
        """Converts a span of the block to one of the module `before + text + after`."""
        shift = len(self.before) - self.start
        return start + shift, end + shift

    def visited(self, transformer: cst.CSTTransformer) -> str:
        """The text after a transformation. Raises ValueError if it changed `before` or `after`."""
        code = self.places.tree.visit(transformer).code
        if not code.startswith(self.before) or not code.endswith(self.after):
            raise ValueError(f"a change beside the class or member that it was made for: {code}")
        return code[len(self.before) : len(code) - len(self.after)]


def places(text: str) -> Places:
    """Parses a module's code. Raises libcst's ParserSyntaxError if it is not Python."""
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)  # a parsed tree has no node twice
    spans = {node: (s.start, s.start + s.length) for node, s in wrapper.resolve(ByteSpanPositionProvider).items()}
    found = Places(wrapper.module, parents={child: node for node in spans for child in node.children})
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
                # in `f(x for x in y)`, `ast` includes the call's parentheses in the generator's span
                above = spans[func.rpar[-1]][1] if func.rpar else spans[func][1]
                found.expressions[text.encode().index(b"(", above), end] = alone
    return found


def below(node: cst.CSTNode) -> list[cst.CSTNode]:
    """All descendants of a node."""
    return [inner for child in node.children for inner in (child, *below(child))]


def code_of(node: cst.CSTNode) -> str:
    return cst.Module(body=[]).code_for_node(node)


def around(before: str, after: str, old: cst.BaseExpression) -> cst.BaseExpression:
    """The expression `before + old + after`, with the node `old` itself: parsed again, its line breaks could end it early."""
    code = cst.parse_expression(f"{before}{PLACEHOLDER}{after}")
    nodes = [code, *below(code)]
    place = next(node for node in nodes if isinstance(node, cst.Name) and node.value == PLACEHOLDER)
    is_argument = any(isinstance(node, cst.Arg) and node.value is place for node in nodes)
    if not (old.lpar or place.lpar) and (isinstance(old, BARE) or (isinstance(old, WEAK) and not is_argument)):
        old = parenthesised(old)
    return code.deep_replace(place, old.with_changes(lpar=[*place.lpar, *old.lpar], rpar=[*old.rpar, *place.rpar]))


def parenthesised(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(lpar=[cst.LeftParen(), *node.lpar], rpar=[*node.rpar, cst.RightParen()])
