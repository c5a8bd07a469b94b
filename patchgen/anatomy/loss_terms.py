"""What a head makes of its loss below the place that computes it, and which terms of it stay numbers of one rank.

A rank's loss is its share of a mean over the step: shares add up. So do their sums, and their products with what is
the same on every rank (numbers, the config). The routers' loss is a share too (`ops.router_loss`). Whatever else is
added, or decides what is added, is of this rank's tokens, and no sum of such numbers is that of all tokens.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from patchgen.anatomy.classes import FunctionNode, targets
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names

SHARES = "ops.router_loss"
CASTS = ("to", "float", "double", "half", "bfloat16", "type_as")
ASKED = ("device", "dtype", "shape")
LINEAR = ast.Mult | ast.Div
ARITHMETIC = ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.IfExp | ast.operator | ast.unaryop | ast.boolop
GIVEN = (
    ARITHMETIC | ast.Constant | ast.Attribute | ast.Subscript | ast.Call | ast.Compare | ast.cmpop | ast.expr_context
)
RESULTS = re.compile(r"transformers\.(modeling_outputs\.\w+|(utils|utils\.generic|file_utils)\.ModelOutput)")


class LossTerms:
    """The loss below the statements that compute it.

    Args:
        forward: the method.
        below: its statements below that place.
        loss, labels: the names of both.
        owner: the class.
        anatomy: of the file.

    Attributes:
        lost: the first statement in which the loss gets a value, or a result, that is not made of it.
        local: the source of each term that nothing makes global, and of each expression that makes no sum of the loss.
    """

    def __init__(
        self, forward: FunctionNode, below: Sequence[ast.stmt], loss: str, labels: str, owner: str, anatomy: Anatomy
    ) -> None:
        self.lost: ast.stmt | None = None
        self._owner, self._anatomy, self._scope = owner, anatomy, local_names(forward)
        self._names = {loss: False}  # and those of what is made of it; True: a result that holds it
        self._labels, self._flags = labels, _flags(forward)
        self._nodes = [node for part in below for node in ast.walk(part)]
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._shares: set[str] = set()
        self._shares = self._share_names()
        found: list[ast.AST] = []
        order = {node: i for i, node in enumerate(self._nodes)}
        for name in (names := [loss]):  # grows
            for node in self._nodes:
                if isinstance(node, ast.Name) and node.id == name:
                    found += self._stored(node) if isinstance(node.ctx, ast.Store) else self._read(node)
            names += [one for one in self._names if one not in names]
        stored = (n for n in self._nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id in names)
        returned = [node for node in self._nodes if isinstance(node, ast.Return)]
        conditions = [one for node in (*stored, *returned) for one in self._conditions(node)]
        without = (node for node in returned if node.value is None or not self._hands_on(node.value))
        self.lost = self.lost or next(without, None)
        found = sorted(found or conditions, key=order.__getitem__)
        self.local = tuple(dict.fromkeys(ast.unparse(node).split("\n")[0] for node in found))

    def _share_names(self) -> set[str]:
        """The names that hold the routers' loss, or None, and nothing else."""
        values: dict[str, list[ast.expr]] = {}
        for node in (n for n in self._nodes if isinstance(n, ast.Name)):
            parent = self._parents.get(node)
            if isinstance(node.ctx, ast.Store):
                is_plain = isinstance(parent, ast.Assign) and not any(self._conditions(node))
                values.setdefault(node.id, []).append(parent.value if is_plain else node)
            elif _may_change(parent, node) and not self.is_result(self._parents.get(parent)):
                values.setdefault(node.id, []).append(node)
        names: set[str] = set()
        for name, assigned in values.items():  # in the order of the source
            known = [value for value in assigned if not _is_none(value)]
            if known and all(self._is_share(value, names) for value in known):
                names.add(name)
        return names

    def _is_share(self, node: ast.expr, names: set[str]) -> bool:
        node = _uncast(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, LINEAR):
            if self._is_number(node.right):
                return self._is_share(node.left, names)
            is_scaled = isinstance(node.op, ast.Mult) and self._is_number(node.left)
            return is_scaled and self._is_share(node.right, names)
        if isinstance(node, ast.Name):
            return node.id in names
        return isinstance(node, ast.Call) and ast.unparse(node.func) == SHARES

    def _stored(self, node: ast.Name) -> Iterator[ast.AST]:
        parent = self._parents.get(node)
        if isinstance(parent, ast.AugAssign) and isinstance(parent.op, ast.Add | ast.Sub):
            yield from self._terms(parent.value)
        elif isinstance(parent, ast.AugAssign):
            if not isinstance(parent.op, LINEAR) or not self._is_number(parent.value):
                yield parent
        else:
            value = parent.value if isinstance(parent, ast.Assign | ast.AnnAssign) else None
            is_unset = node.id != next(iter(self._names)) and value is not None and _is_none(value)
            if not is_unset and (value is None or not (self._names[node.id] or self._is_made_of_it(value))):
                self.lost = self.lost or self._statement(node)

    def _read(self, node: ast.Name) -> Iterator[ast.AST]:
        """Follows a value made of the loss to where it is bound or handed on; yields what is not a sum of shares."""
        child, is_result = node, self._names[node.id]
        while (parent := self._parents.get(child)) is not None:
            if isinstance(parent, ast.Return):
                return
            if isinstance(parent, ast.Assign | ast.AnnAssign) and all(
                isinstance(t, ast.Name) for t in targets(parent)
            ):
                for target in targets(parent):
                    self._names[target.id] = self._names.get(target.id, False) or is_result
                return
            if isinstance(parent, ast.Compare) and _is_none(parent.comparators[0]):
                return
            if isinstance(parent, ast.Tuple) or self.is_result(parent):
                is_result = True
            elif is_result and not isinstance(parent, ast.BinOp | ast.IfExp | ast.keyword):
                self.lost = self.lost or self._statement(node)  # somebody may change what the result holds
                return
            elif isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub):
                if not is_result:
                    yield from self._terms(parent.right if child is parent.left else parent.left)
            elif isinstance(parent, ast.IfExp) and child is not parent.test:
                yield from () if is_result else self._terms(parent.orelse if child is parent.body else parent.body)
                yield from () if self._is_same(parent.test) else (parent.test,)
            elif isinstance(parent, ast.Attribute) and parent.attr in ASKED:
                return
            elif not self._keeps_a_share(parent, child):
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

    def _conditions(self, node: ast.AST) -> Iterator[ast.AST]:
        """The conditions and loops around a statement that need not be the same on every rank."""
        while (node := self._parents.get(node)) is not None:
            is_block = isinstance(node, ast.stmt) and hasattr(node, "body")
            if is_block and not (isinstance(node, ast.If) and self._is_same(node.test)):
                yield node

    def _hands_on(self, value: ast.expr) -> bool:
        """Whether what is returned has the loss in the loss's place."""
        if isinstance(value, ast.IfExp):
            return self._hands_on(value.body)
        if isinstance(value, ast.BinOp):
            return self._hands_on(value.left)
        if isinstance(value, ast.Tuple):
            return bool(value.elts) and self._is_made_of_it(value.elts[0])
        if self.is_result(value):
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            first = given.get("loss", value.args[0] if value.args else None)
            return first is not None and self._is_made_of_it(first)
        return isinstance(value, ast.Name) and self._names.get(value.id, False)

    def _is_made_of_it(self, node: ast.AST) -> bool:
        """Whether a value is made of the loss, and not of what is asked about it."""
        if isinstance(node, ast.Compare) or (isinstance(node, ast.Attribute) and node.attr in ASKED):
            return False
        if isinstance(node, ast.Name):
            return node.id in self._names
        return any(map(self._is_made_of_it, ast.iter_child_nodes(node)))

    def _statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def _keeps_a_share(self, parent: ast.AST, child: ast.AST) -> bool:
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, LINEAR):
            other = parent.right if child is parent.left else parent.left
            return self._is_number(other) and not (isinstance(parent.op, ast.Div) and child is parent.right)
        if isinstance(parent, ast.Attribute):
            return parent.attr in CASTS
        is_cast = isinstance(parent, ast.Call) and child is parent.func  # the attribute was one
        return is_cast or isinstance(parent, ast.keyword | ast.UnaryOp)

    def _is_same(self, node: ast.AST) -> bool:
        """Whether a condition holds on all ranks or on none: of numbers, flags, and whether there is a loss at all."""
        match node:
            case ast.Compare(ast.Name(name), [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
                return name in {self._labels, *self._names, *self._shares}
            case ast.BoolOp(values=parts) | ast.Compare(comparators=parts):
                return all(map(self._is_same, [*parts, *([node.left] if isinstance(node, ast.Compare) else [])]))
            case ast.UnaryOp(_, operand):
                return self._is_same(operand)
            case ast.Name(name):
                return name in self._flags
        return ast.unparse(node) == "self.training" or self._is_number(node)

    def _is_number(self, node: ast.AST) -> bool:
        return is_number(node, self._owner, self._anatomy)

    def is_result(self, node: ast.AST | None) -> bool:
        """Whether an expression makes a result of transformers'."""
        return isinstance(node, ast.Call) and is_result_class(node.func, self._anatomy, self._scope)


def is_number(node: ast.AST, owner: str, anatomy: Anatomy) -> bool:
    """Whether an expression has one value on all ranks: made of numbers, and of what `self` took from the config for good."""
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        parts = (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
        return all(is_number(part, owner, anatomy) for part in parts)
    if not re.fullmatch(r"self(\.\w+)+", source := ast.unparse(node)):
        return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    first, *more = names = source.split(".")[1:]
    methods = [node for info in anatomy.classes.values() for name, node in info.methods.items() if name != "__init__"]
    for part in (part for code in (*methods, *anatomy.functions.values()) for part in ast.walk(code)):
        stored = part.attr if isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load) else None
        if stored in names or (isinstance(part, ast.Constant) and part.value in names):  # `setattr(self, "name", ..)`
            return False
    held = anatomy.held(owner, first)
    return first == "config" if more else bool(held) and all(map(_is_given, held))


def is_result_class(function: ast.expr, anatomy: Anatomy, scope: set[str]) -> bool:
    """Whether a call makes one of transformers' results, or one that the file derives from them and gives fields alone."""
    meaning = anatomy.names.resolve(function, scope) or ""
    if RESULTS.fullmatch(meaning):
        return True
    info = anatomy.classes.get(meaning.removeprefix(".")) if meaning.startswith(".") else None
    if info is None or info.methods or not info.node.bases:
        return False
    decorators = [anatomy.names.resolve(d.func if isinstance(d, ast.Call) else d) for d in info.node.decorator_list]
    is_plain = all(name and not name.startswith(".") for name in decorators)
    return is_plain and all(is_result_class(base, anatomy, set()) for base in info.node.bases)


def _flags(forward: FunctionNode) -> set[str]:
    """The parameters that may be bools, and that stay what callers handed in, or the config's."""
    given = (*forward.args.args, *forward.args.kwonlyargs)
    flags = {arg.arg for arg in given if arg.annotation is None or "bool" in ast.unparse(arg.annotation)} - {"self"}
    for node in ast.walk(forward):
        for target in (
            targets(node) if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) else ()
        ):
            name = ast.unparse(target)
            default = rf"{name} if {name} is not None else self\.config(\.\w+)+"
            if name in flags and not re.fullmatch(default, ast.unparse(node.value) if node.value else ""):
                flags.remove(name)
    return flags


def _is_given(value: ast.AST) -> bool:
    """Whether `__init__` takes a value from the config and from numbers alone."""
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    source = ast.unparse(value)
    is_known = names <= {"config", "self", "getattr", "float", "int"} and source.count("self") == source.count(
        "self.config"
    )
    return is_known and all(isinstance(node, GIVEN | ast.Name) for node in ast.walk(value))


def _may_change(parent: ast.AST, child: ast.AST) -> bool:
    """Whether code that reads a tensor there may change it in place: a method like `mul_`, an index, a call."""
    if isinstance(parent, ast.Attribute):
        return parent.attr not in CASTS + ASKED
    return isinstance(parent, ast.Subscript | ast.Call | ast.keyword | ast.Starred)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _uncast(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CASTS:
        node = node.func.value
    return node
