"""Applies changes to the libcst nodes of a part of a block (`places.Part`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, cast

import libcst as cst

from patchgen.errors import Missed
from patchgen.places import Part, Places, Statement, code_of

Replacement = cst.CSTNode | cst.FlattenSentinel[cst.CSTNode] | cst.RemovalSentinel
Edit = Callable[[Any], Replacement]  # its argument is a node of the class that it is registered for
Changes = Mapping[cst.CSTNode, Sequence[Edit]]


@dataclass
class Change:
    """The changes of one statement: statements to insert around it, its replacement, the comment of the pass."""

    above: list[Statement] = field(default_factory=list[Statement])  # between its comments and the statement
    below: list[Statement] = field(default_factory=list[Statement])
    top: list[Statement] = field(default_factory=list[Statement])  # above its comments and blank lines
    instead: Sequence[Statement] | None = None  # what replaces it; empty removes it, None keeps it
    with_lead: bool = True  # whether the comments and blank lines above it stay when it is replaced
    mark: str | None = None  # the comment of the pass; None adds none

    def apply(self, statement: Statement) -> Statement | cst.FlattenSentinel[Statement] | cst.RemovalSentinel:
        kept = [statement] if self.instead is None else list(self.instead)
        lead = list(statement.leading_lines) if self.instead is None or self.with_lead else []
        if self.instead is not None and kept:
            lead += kept[0].leading_lines
        comments = [line.comment.value for line in lead if line.comment]
        if self.mark is not None and not (self.instead is not None and f"# {self.mark}" in comments):
            lead.append(cst.EmptyLine(comment=cst.Comment(f"# {self.mark}")))
        above = list(self.above)
        if above:  # the statement's blank lines move above the inserted code
            blank = list(takewhile(lambda line: line.comment is None, lead))
            above[0] = above[0].with_changes(leading_lines=[*blank, *above[0].leading_lines])
            lead = lead[len(blank) :]
        if kept:
            kept[0] = kept[0].with_changes(leading_lines=lead)
        nodes = [*self.top, *above, *kept, *self.below]
        return nodes[0] if len(nodes) == 1 else cst.FlattenSentinel(nodes) if nodes else cst.RemoveFromParent()


class _Apply(cst.CSTTransformer):
    """Applies the changes of each node, inner nodes first; visits only these nodes and their ancestors."""

    def __init__(self, changes: Changes, found: Places) -> None:
        self._changes = changes
        self._visited = {*changes, *(holder for node in changes for holder in found.holders(node))}

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self._visited

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> cst.CSTNodeT:
        replaced: Replacement = updated_node
        for change in self._changes.get(original_node, ()):
            replaced = change(replaced)
        return cast("cst.CSTNodeT", replaced)  # libcst's annotations allow only a node of the same class


def visited(part: Part, changes: Changes) -> str:
    """The text of `part` after `changes`. Raises Missed, which names the statement, if libcst rejects a change."""
    found = part.places
    try:
        return part.visited(_Apply(changes, found))
    except cst.CSTValidationError as error:
        node = next((node for node in changes if not _is_valid(part, {node: changes[node]})), found.tree)
        statement = next((one for one in (node, *found.holders(node)) if one in found.statements.values()), node)
        raise Missed(f"code that takes a change: {error}", code_of(statement)) from error


def _is_valid(part: Part, changes: Changes) -> bool:
    try:
        part.visited(_Apply(changes, part.places))
    except cst.CSTValidationError:
        return False
    return True
