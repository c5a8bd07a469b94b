"""What a head makes of its loss below the place that computes it, and which terms of it stay numbers of one rank.

A rank's loss is its share of a mean over the step: shares add up. So do their sums, and their products with what is
the same on every rank (numbers, the config, parameters). The routers' loss is a share too (`ops.router_loss`). Whatever
else is added is a number of this rank's tokens, and no sum of such numbers is that of all tokens.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from patchgen.anatomy.classes import dotted, reads_name

SHARES = "ops.router_loss"
CASTS = ("to", "float", "double", "half", "bfloat16", "type_as")
LINEAR = ast.Mult | ast.Div


class LossTerms:
    """The loss below the statements that compute it.

    Attributes:
        lost: the first statement that gives the loss another value, in which it has no part.
        local: the source of each term that nothing makes global, and of each expression that makes no sum of the loss.
    """

    def __init__(self, below: Sequence[ast.stmt], loss: str) -> None:
        self.lost: ast.stmt | None = None
        self._names = [loss]  # and those of what is made of it
        self._nodes = [node for part in below for node in ast.walk(part)]
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._shares = self._share_names()
        found: list[ast.AST] = []
        for name in self._names:  # grows
            for node in self._nodes:
                if isinstance(node, ast.Name) and node.id == name:
                    found += self._stored(node) if isinstance(node.ctx, ast.Store) else self._read(node)
        order = {node: i for i, node in enumerate(self._nodes)}
        found.sort(key=order.__getitem__)
        self.local = tuple(dict.fromkeys(ast.unparse(node).split("\n")[0] for node in found))

    def _share_names(self) -> set[str]:
        """The names that hold the routers' loss, or None, and nothing else."""
        values: dict[str, list[ast.expr]] = {}
        for node in self._nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                parent = self._parents.get(node)
                values.setdefault(node.id, []).append(parent.value if isinstance(parent, ast.Assign) else node)
        names: set[str] = set()
        for name, assigned in values.items():  # in the order of the source
            known = [value for value in assigned if not _is_none(value)]
            if known and all(self._is_share(value, names) for value in known):
                names.add(name)
        return names

    def _is_share(self, node: ast.expr, names: set[str]) -> bool:
        node = _uncast(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, LINEAR):
            if _is_same_everywhere(node.right):
                return self._is_share(node.left, names)
            is_scaled = isinstance(node.op, ast.Mult) and _is_same_everywhere(node.left)
            return is_scaled and self._is_share(node.right, names)
        if isinstance(node, ast.Name):
            return node.id in names
        return isinstance(node, ast.Call) and dotted(node.func) == SHARES

    def _stored(self, node: ast.Name) -> Iterator[ast.AST]:
        parent = self._parents.get(node)
        if isinstance(parent, ast.AugAssign) and isinstance(parent.op, ast.Add | ast.Sub):
            yield from self._terms(parent.value)
        elif isinstance(parent, ast.AugAssign):
            if not isinstance(parent.op, LINEAR) or not _is_same_everywhere(parent.value):
                yield parent
        elif node.id == self._names[0]:
            value = getattr(parent, "value", None)
            if value is None or not any(reads_name(value, name) for name in self._names):
                self.lost = self.lost or self._statement(node)

    def _read(self, node: ast.Name) -> Iterator[ast.AST]:
        """Follows a value made of the loss to where it is bound or handed on; yields what is not a sum of shares."""
        child: ast.AST = node
        while (parent := self._parents.get(child)) is not None:
            if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub):
                yield from self._terms(parent.right if child is parent.left else parent.left)
            elif isinstance(parent, ast.IfExp) and child is not parent.test:
                yield from self._terms(parent.orelse if child is parent.body else parent.body)
            elif _asks(parent):
                return
            elif isinstance(parent, ast.Assign) and all(isinstance(target, ast.Name) for target in parent.targets):
                self._names += [target.id for target in parent.targets if target.id not in self._names]
                return
            elif isinstance(parent, ast.Return | ast.Tuple | ast.Dict) or _makes_output(parent):
                return
            elif not _keeps_a_share(parent, child):
                yield self._statement(node)
                return
            child = parent

    def _terms(self, node: ast.expr) -> Iterator[ast.AST]:
        """What of a sum is no share."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            yield from self._terms(node.left)
            yield from self._terms(node.right)
        elif not (_is_none(node) or self._is_share(node, self._shares | set(self._names))):
            yield node

    def _statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node


def _asks(parent: ast.AST) -> bool:
    """Whether a value is asked about there, not computed with: `loss is None`, `loss.device`."""
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("device", "dtype", "shape")
    return isinstance(parent, ast.IfExp) or (isinstance(parent, ast.Compare) and _is_none(parent.comparators[0]))


def _keeps_a_share(parent: ast.AST, child: ast.AST) -> bool:
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, LINEAR):
        other = parent.right if child is parent.left else parent.left
        return _is_same_everywhere(other) and not (isinstance(parent.op, ast.Div) and child is parent.right)
    if isinstance(parent, ast.Attribute):
        return parent.attr in CASTS
    is_cast = isinstance(parent, ast.Call) and child is parent.func  # the attribute was one
    return is_cast or isinstance(parent, ast.keyword | ast.UnaryOp)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _uncast(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CASTS:
        node = node.func.value
    return node


def _is_same_everywhere(node: ast.expr) -> bool:
    """Whether an expression is made of numbers and of what `self` holds: the config, parameters."""
    allowed = ast.Constant | ast.Attribute | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.expr_context
    return all(
        isinstance(part, allowed) or (isinstance(part, ast.Name) and part.id == "self") for part in ast.walk(node)
    )


def _makes_output(node: ast.AST) -> bool:
    """A call of one of upstream's result classes: `CausalLMOutputWithPast(...)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and is_output(node.func.id)


def is_output(name: str) -> bool:
    """Upstream's result classes: `CausalLMOutputWithPast`, `Gemma3CausalLMOutputWithPast`, ..."""
    return "Output" in name
