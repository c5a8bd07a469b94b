"""What a head does with its loss after computing it, and which of the added terms are numbers of one rank.

A rank's loss is its share of a mean over the step: the shares of all ranks add up. So do sums of shares, and their products
with what is the same on every rank (numbers, the config). The routers' loss is a share too (`ops.router_loss`). Any other
term, or condition on one, depends on this rank's tokens: summed over ranks, it is not the value for all tokens.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import re
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Sequence

from patchgen.anatomy import known
from patchgen.anatomy.assignments import ASKED, values_in
from patchgen.anatomy.classes import (
    FunctionNode,
    arguments,
    loaded,
    parameter_names,
    parameters,
    stored,
    targets,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.hooks import GRADIENT_HOOKS, hooks
from patchgen.anatomy.names import is_of_config, local_names
from patchgen.anatomy.state_changes import CASTS, StateChanges, derived_from, flags

SHARES = "ops.router_loss"
STATE = "changes self for the next call, on each rank alone"
LOSS, SHARE, RESULT, NONE, OTHER = "loss", "share", "result", "none", "other"  # what a name holds
RESULTS = re.compile(r"transformers\.(modeling_outputs\.\w+|(utils|utils\.generic|file_utils)\.ModelOutput)")


class LossTerms:
    """Follows the loss through `below`, the statements of a head's forward below its computation.

    Attributes:
        lost: the first statement that gives the loss, or a result, a value not made from the loss; None without one.
        local: the source of each term that is no share, and of each expression that makes something other than a sum of the
            loss; without any, of the conditions that may differ between ranks and decide on the loss.
    """

    def __init__(
        self, forward: FunctionNode, below: Sequence[ast.stmt], loss: str, labels: str, owner: str, anatomy: Anatomy
    ) -> None:
        self.lost: ast.AST | None = None
        self._owner, self._anatomy, self._scope = owner, anatomy, local_names(forward)
        self._labels, self._flags = labels, flags(forward)
        above = [forward.args, *forward.body[: len(forward.body) - len(below)]]
        nodes = [node for part in above for node in walk(part)]
        unset = [n for n in nodes if isinstance(n, ast.Assign) and ast.unparse(n.value) == "None"]
        count = Counter(stored(*above)) - Counter(stored(*unset))
        held = {arg.arg for arg in nodes if isinstance(arg, ast.arg)}.union(count)
        self._kinds = dict.fromkeys(held, OTHER) | {loss: LOSS}
        self._found: list[ast.AST] = []
        conditions = [one for node in below for one in self._read(node, None)]
        self.local = tuple(dict.fromkeys(ast.unparse(node).split("\n")[0] for node in self._found or conditions))

    def _read(self, node: ast.AST, around: ast.AST | None) -> Iterator[ast.AST]:
        """Follows the loss through a statement and those inside it; yields the conditions that decide on the loss.

        `around` is the outermost condition or loop around the statement that may differ between ranks.
        """
        inside = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt | ast.ExceptHandler)]
        own = [n for n in ast.iter_child_nodes(node) if n not in inside]
        contains_loss = any(map(self._contains_loss, own))
        value = getattr(node, "value", None)
        name = ast.unparse(targets(node)[0]) if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) else ""
        kind = self._kind(value) if value is not None else OTHER
        is_plain = name.isidentifier() or isinstance(node, ast.Return)
        if not (is_plain and kind != OTHER) and not (isinstance(node, ast.If) and self._is_same_on_ranks(node.test)):
            for one in {n for n in loaded(*own) if self._kinds.get(n) in (SHARE, RESULT)}:  # may be changed in place
                self.lost = (self.lost or node) if self._kinds[one] == RESULT else self.lost
                self._kinds[one] = OTHER
            around = around or (node if inside else None)
        for one in (one for one in stored(*own) if one != name):
            self.lost = (self.lost or node) if self._kinds.get(one) in (LOSS, RESULT) else self.lost
            self._kinds[one] = OTHER
        if isinstance(node, ast.AugAssign):
            before = self._kinds.get(name)
            is_sum = isinstance(node.op, ast.Add | ast.Sub) and before == LOSS
            is_scaled = isinstance(node.op, ast.Mult | ast.Div) and self._is_number(node.value)
            strange = list(self._terms(node.value)) if is_sum else [] if is_scaled else [node]
            self._found += strange if before == LOSS or contains_loss else ()
            self.lost = (self.lost or node) if before == RESULT else self.lost
            self._kinds[name] = before if before == LOSS or (before == SHARE and is_scaled and not around) else OTHER
        elif isinstance(node, ast.Return):
            self.lost = self.lost if kind == RESULT else self.lost or node
        elif name.isidentifier():
            self._assigned(node, name, value, kind, around)
        if not inside and not isinstance(node, ast.AugAssign) and contains_loss:
            self._found += self._strange(node, value, kind)
        if around is not None and (isinstance(node, ast.Return) or self._kinds.get(name) == LOSS):
            yield around
        for one in inside:
            yield from self._read(one, around)

    def _strange(self, node: ast.AST, value: ast.expr | None, kind: str) -> Iterator[ast.AST]:
        """The terms, in a statement that reads the loss, that are no shares; for one that contains the loss, the statement."""
        parts = self._losses_in(value) if kind == RESULT else None
        for part in [value] if parts is None else parts:
            for term in self._terms(part) if part is not None else (node,):
                yield node if self._contains_loss(term) else term

    def _assigned(self, node: ast.AST, name: str, value: ast.expr | None, kind: str, around: ast.AST | None) -> None:
        before = self._kinds.get(name, NONE)
        if kind == OTHER and value is not None and self._contains_loss(value):
            kind = LOSS
        elif kind == SHARE and around is not None:
            kind = OTHER
        if before in (LOSS, RESULT) and kind != before:
            self.lost = self.lost or node
        self._kinds[name] = kind if before in (NONE, kind) else before if kind == NONE else OTHER

    def _kind(self, node: ast.expr) -> str:
        """The kind of an expression's value; `OTHER` where it is not understood."""
        match node:
            case ast.Constant(None):
                return NONE
            case ast.Name(name):
                return self._kinds.get(name, OTHER)
            case ast.Call(ast.Attribute(value, attribute)) if attribute in CASTS:
                kind = self._kind(value)
            case ast.Call() if ast.unparse(node.func) == SHARES:
                return SHARE
            case ast.BinOp(left, ast.Add() | ast.Sub(), right) | ast.IfExp(_, left, right) if (
                self._losses_in(node) is None
            ):
                if isinstance(node, ast.IfExp) and not self._is_same_on_ranks(node.test):
                    return OTHER
                kinds = {self._kind(left), self._kind(right)} - ({NONE} if isinstance(node, ast.IfExp) else set())
                kind = kinds.pop() if len(kinds) == 1 else LOSS if kinds == {LOSS, SHARE} else OTHER
            case ast.BinOp(left, ast.Mult(), right) if self._is_number(left):
                kind = self._kind(right)
            case ast.BinOp(left, ast.Mult() | ast.Div(), right) if self._is_number(right):
                kind = self._kind(left)
            case ast.UnaryOp(ast.USub(), operand):
                kind = self._kind(operand)
            case _:
                handed = self._losses_in(node)
                return RESULT if handed is not None and all(map(self._contains_loss, handed)) else OTHER
        return kind if kind in (LOSS, SHARE) else OTHER

    def _terms(self, node: ast.expr) -> Iterator[ast.AST]:
        """The terms of a sum that are no shares, and its conditions that may differ between ranks."""
        if self._kind(node) in (LOSS, SHARE, NONE):
            return
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            yield from (*self._terms(node.left), *self._terms(node.right))
        elif isinstance(node, ast.IfExp):
            yield from (*self._terms(node.body), *self._terms(node.orelse))
            yield from () if self._is_same_on_ranks(node.test) else (node.test,)
        else:
            yield node

    def _losses_in(self, value: ast.expr | None) -> list[ast.expr] | None:
        """The expressions for the loss in a result; none for a name that holds a result already. None if it is no result."""
        match value:
            case ast.Name(name) if self._kinds.get(name) == RESULT:
                return []
            case ast.IfExp(test, left, right):
                body, orelse = self._losses_in(left), self._losses_in(right)
                names = [self._labels, *(name for name, kind in self._kinds.items() if kind == LOSS)]
                asked = {f"{name} is not None" for name in names}
                if body is None or (orelse is None and ast.unparse(test) not in asked):
                    return None
                return [*body, *(orelse or ())]
            case ast.BinOp(left, ast.Add()):
                return self._losses_in(left)
            case ast.Tuple([first, *_]):
                return [first]
            case ast.Call() if self.is_result(value):
                return [arguments(value, ("loss",)).get("loss", ast.Constant(None))]
        return None

    def _contains_loss(self, node: ast.AST) -> bool:
        """Whether an expression reads the value of the loss, rather than compares it or asks for its shape or the like."""
        if isinstance(node, ast.Compare) or (isinstance(node, ast.Attribute) and node.attr in ASKED):
            return False
        is_loss = isinstance(node, ast.Name) and self._kinds.get(node.id) == LOSS and isinstance(node.ctx, ast.Load)
        return is_loss or any(map(self._contains_loss, ast.iter_child_nodes(node)))

    def _is_same_on_ranks(self, node: ast.AST) -> bool:
        """Whether a condition is the same on all ranks: made of numbers, flags, and whether there are labels or a loss.

        `same_on_ranks` knows more forms, and neither labels nor losses: a rank may have no labels, and its loss then differs.
        """
        match node:
            case ast.Compare(ast.Name(name), [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
                return name == self._labels or self._kinds.get(name) in (LOSS, SHARE, NONE)
            case ast.BoolOp(_, parts):
                return all(map(self._is_same_on_ranks, parts))
            case ast.Compare(left, _, others):
                return all(map(self._is_same_on_ranks, [left, *others]))
            case ast.UnaryOp(_, operand):
                return self._is_same_on_ranks(operand)
            case ast.Name() | ast.Call():
                return ast.unparse(node) in self._flags
        return ast.unparse(node) == "self.training" or self._is_number(node)

    def _is_number(self, node: ast.AST) -> bool:
        return is_number(node, self._owner, self._anatomy)

    def is_result(self, node: ast.AST | None) -> bool:
        """Whether an expression builds one of transformers' results (see `is_result_class`)."""
        return isinstance(node, ast.Call) and is_result_class(node.func, self._anatomy, self._scope)


def unseen_terms(anatomy: Anatomy, head: str) -> Iterator[str]:
    """Code of the classes below a head that changes gradients by one rank's tokens, apart from any loss: hooks on gradients,
    gradients that a backward makes from none of its arguments, and values that a forward changes for the next call."""
    infos = [anatomy.classes[name] for name in sorted(anatomy.reached_from([head]))]
    for code in anatomy.names.outside_classes:
        yield from hooks(code, anatomy, GRADIENT_HOOKS)
    for info, method in [(one, method) for one in infos for method in one.methods.values()]:
        if method.name == "forward":
            changes = StateChanges(anatomy, info.name).of(method, parameters(method), {})
            yield from (f"{info.name}.forward {STATE}: {source}" for source in dict.fromkeys(changes))
        yield from hooks(method, anatomy, GRADIENT_HOOKS)
        for node in walk(method):
            match node:
                case ast.Return(ast.expr() as value) if method.name == "backward":
                    derived = derived_from(anatomy.names, method, set(parameter_names(method)[1:]))
                    for part in value.elts if isinstance(value, ast.Tuple) else [value]:
                        if not (isinstance(part, ast.Constant) or derived & values_in(anatomy.names, part)):
                            yield f"{info.name}.backward: {ast.unparse(part)}"


def is_number(node: ast.AST, owner: str, anatomy: Anatomy) -> bool:
    """Whether an expression has one value on all ranks: it is made of numbers, and of what `self` has from the config."""
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        parts = (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
        return all(is_number(part, owner, anatomy) for part in parts)
    if not re.fullmatch(r"self(\.\w+)+", source := ast.unparse(node)):
        return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    first, *more = source.split(".")[1:]
    if not more:
        return known.is_number(anatomy, owner, first)
    held = [value for value in anatomy.held(owner, first) if isinstance(value, ast.expr)]
    is_changed = anatomy.is_stored_outside(first, [owner]) or any(map(anatomy.is_stored_outside, more))
    return first == "config" and not is_changed and all(map(is_of_config, held))


def is_result_class(function: ast.expr, anatomy: Anatomy, scope: Container[str]) -> bool:
    """Whether a called class is one of transformers' results, or a subclass in the file that only adds fields and properties:
    making a result runs no property, and fails where one has a field's name."""
    meaning = anatomy.names.resolve(function, scope) or ""
    if RESULTS.fullmatch(meaning):
        return True
    info = anatomy.classes.get(anatomy.names.here(function, scope))
    if info is None or not info.node.bases or not all(_adds_a_property(one, anatomy) for one in info.methods.values()):
        return False
    decorators = [anatomy.names.resolve(d.func if isinstance(d, ast.Call) else d) for d in info.node.decorator_list]
    is_plain = all(name and not name.startswith(".") for name in decorators)
    return is_plain and all(is_result_class(base, anatomy, ()) for base in info.node.bases)


def _adds_a_property(method: FunctionNode, anatomy: Anatomy) -> bool:
    """Whether a method of a result's class is a property that no code of a result's own runs."""
    is_property = [anatomy.names.resolve(decorator) for decorator in method.decorator_list] == ["builtins.property"]
    return is_property and not method.name.startswith("_") and method.name not in (*dir(OrderedDict), "to_tuple")
