"""Operators on one expression: each yields the forms to replace it with."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from patchgen.anatomy.classes import FunctionNode, dotted, own_attribute, parameter_names
from patchgen.mutation.edits import Mutant, Place, expressions

VALUED = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
Forms = Callable[[ast.expr, Place], Iterator[ast.expr]]


@dataclass(frozen=True)
class ExpressionOperator:
    """A change of an expression.

    Attributes:
        name: for the table.
        forms: `(expression, place) -> other expressions`.
        keeps_meaning: they have the same value.
        of_values: only values that are assigned or returned are changed.
    """

    name: str
    forms: Forms
    keeps_meaning: bool = False
    of_values: bool = False

    def mutants(self, place: Place) -> Iterator[Callable[[], Mutant]]:
        """The mutants of one statement, as functions that build them."""
        for expression in _values(place.statement) if self.of_values else expressions(place.statement):
            for form in self.forms(expression, place):
                yield lambda old=expression, new=form: self._mutant(place, old, new)

    def _mutant(self, place: Place, old: ast.expr, new: ast.expr) -> Mutant:
        change = f"{ast.unparse(old)} -> {ast.unparse(ast.fix_missing_locations(copy.deepcopy(new)))}"
        return Mutant(self.name, place.where, change, place.with_expression(old, new), self.keeps_meaning)


def _values(statement: ast.stmt) -> Iterator[ast.expr]:
    value = getattr(statement, "value", None) if isinstance(statement, VALUED) else None
    if value is not None and not isinstance(value, ast.Constant | ast.Tuple):
        yield value


def constants(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
    elif isinstance(node.value, float):
        yield from (ast.Constant(node.value * 1.5 + 0.01), ast.Constant(0.0))


SWAPPED: dict[type, Callable[[], Any]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def operators(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        changed = copy.deepcopy(node)
        changed.op = SWAPPED[type(node.op)]()
        yield changed
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        changed = copy.deepcopy(node)
        changed.ops[0] = SWAPPED[type(node.ops[0])]()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand


def dropped_arguments(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    if not isinstance(node, ast.Call):
        return
    for i in range(len(node.args)):
        changed = copy.deepcopy(node)
        del changed.args[i]
        yield changed
    for i in range(len(node.keywords)):
        changed = copy.deepcopy(node)
        del changed.keywords[i]
        yield changed


def swapped_arguments(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call):
        for i in range(len(node.args) - 1):
            changed = copy.deepcopy(node)
            changed.args[i], changed.args[i + 1] = changed.args[i + 1], changed.args[i]
            yield changed


def other_arguments(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    """An argument is replaced by another name of the function: one assigned above, or a parameter."""
    if not isinstance(node, ast.Call):
        return
    names = parameter_names(place.function) + [
        target.id
        for statement in place.body[: place.index]
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]
    for i, argument in enumerate(node.args):
        for other in dict.fromkeys(names):
            if isinstance(argument, ast.Name) and argument.id in names and other not in ("self", argument.id):
                changed = copy.deepcopy(node)
                changed.args[i] = ast.Name(other, ast.Load())
                yield changed


# The parameters of functions and modules that are defined outside the file.
SIGNATURES = {
    "nn.functional.linear": ("input", "weight", "bias"),
    "F.linear": ("input", "weight", "bias"),
    "nn.functional.softmax": ("input", "dim"),
    "F.softmax": ("input", "dim"),
    "nn.Linear": ("input",),
    "nn.Embedding": ("input",),
    "torch.matmul": ("input", "other"),
    "torch.topk": ("input", "k"),
}


def signature(call: ast.Call, place: Place) -> tuple[str, ...] | None:
    """The parameters of the called function or module, None if unknown."""
    functions = {node.name: node for node in place.source.tree.body if isinstance(node, FunctionNode)}
    classes = {node.name: node for node in place.source.tree.body if isinstance(node, ast.ClassDef)}
    name = dotted(call.func)
    if isinstance(call.func, ast.Name) and name in functions:
        return tuple(parameter_names(functions[name]))
    attribute = own_attribute(call.func)
    if attribute is None:
        return SIGNATURES.get(name)
    if place.owner is None:
        return None
    for member in place.owner.body:
        if isinstance(member, FunctionNode) and member.name == attribute:
            return tuple(parameter_names(member))
    for node in ast.walk(place.owner):
        match node:
            case ast.Assign([target, *_], ast.Call(function)) if own_attribute(target) == attribute:
                built = dotted(function)
                forward = [m for m in getattr(classes.get(built), "body", ()) if getattr(m, "name", "") == "forward"]
                return tuple(parameter_names(forward[0])) if forward else SIGNATURES.get(built)
    return None


def as_keywords(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    if not isinstance(node, ast.Call) or not node.args or any(isinstance(arg, ast.Starred) for arg in node.args):
        return
    names = signature(node, place)
    if names is None or len(node.args) > len(names):
        return
    changed = copy.deepcopy(node)
    changed.keywords[:0] = [ast.keyword(n, v) for n, v in zip(names, changed.args, strict=False)]
    changed.args = []
    yield changed


def as_positions(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    if not isinstance(node, ast.Call):
        return
    names, keywords = signature(node, place), {keyword.arg: keyword for keyword in node.keywords}
    if names is None or len(node.args) >= len(names) or names[len(node.args)] not in keywords:
        return
    changed = copy.deepcopy(node)
    following = names[len(node.args)]
    changed.args.append(keywords[following].value)
    changed.keywords = [keyword for keyword in changed.keywords if keyword.arg != following]
    yield changed


def filled(template: str, node: ast.expr) -> ast.expr:
    """The expression `template` with `node` in place of each `X`."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return copy.deepcopy(filling) if node.id == "X" else node

    filling = node
    return Fill().visit(ast.parse(template, mode="eval").body)


def _wrapped(*templates: str) -> Forms:
    """The expression wrapped in each template."""
    return lambda node, place: (filled(template, node) for template in templates)


def commuted(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    """`b * a` for `a * b`, `b + a` for `a + b`: bit-identical for tensors."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        yield ast.BinOp(copy.deepcopy(node.right), node.op, copy.deepcopy(node.left))


EXPRESSION_OPERATORS = (
    ExpressionOperator("constant", constants),
    ExpressionOperator("operator", operators),
    ExpressionOperator("argument dropped", dropped_arguments),
    ExpressionOperator("arguments swapped", swapped_arguments),
    ExpressionOperator("another argument", other_arguments),
    ExpressionOperator("clamped", _wrapped("X.clamp(-0.01, 0.02)"), of_values=True),
    ExpressionOperator("scaled", _wrapped("X * 1.25"), of_values=True),
    ExpressionOperator("detached", _wrapped("X.detach()"), of_values=True),
    ExpressionOperator("flipped", _wrapped("X.flip(-1)"), of_values=True),
    ExpressionOperator("soft cap", _wrapped("5.0 * torch.tanh(X / 5.0)"), of_values=True),
    ExpressionOperator("in another dtype", _wrapped("X.double().float()"), keeps_meaning=True, of_values=True),
    ExpressionOperator("mean removed", _wrapped("X - X.mean(-1, keepdim=True)"), of_values=True),
    ExpressionOperator(
        "-1 as another parameter",
        _wrapped("X * nn.functional.normalize(X.clamp(-1, 1) + 4.0, -1) * 0.1"),
        of_values=True,
    ),
    ExpressionOperator("reduced twice", _wrapped("X * X.mean(-1).softmax(-1)[..., None]"), of_values=True),
    ExpressionOperator("rolled along the tokens", _wrapped("X.roll(1, -2)"), of_values=True),
    ExpressionOperator("positional to keyword", as_keywords, keeps_meaning=True),
    ExpressionOperator("keyword to positional", as_positions, keeps_meaning=True),
    ExpressionOperator("commuted", commuted, keeps_meaning=True),
    ExpressionOperator("no dropout", _wrapped("nn.functional.dropout(X, 0.0)"), keeps_meaning=True, of_values=True),
    ExpressionOperator("reshaped to itself", _wrapped("X.view(X.shape)"), keeps_meaning=True, of_values=True),
    ExpressionOperator("contiguous", _wrapped("X.contiguous()"), keeps_meaning=True, of_values=True),
    ExpressionOperator(
        "of another rank and back",
        _wrapped("X.unsqueeze(0).squeeze(0)", "X[None][0]", "X.transpose(0, 1).transpose(0, 1)"),
        keeps_meaning=True,
        of_values=True,
    ),
    ExpressionOperator("in parentheses with nothing added", _wrapped("+X"), keeps_meaning=True, of_values=True),
)
