"""Operators on losses: the formula of a loss function, what a head does with its result, the factor of the loss."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from patchgen.anatomy.classes import FunctionNode, parameter_names
from patchgen.mutation.edits import Place
from patchgen.mutation.expressions import filled
from patchgen.mutation.whole_file import Change, FileOperator

FORMULAS = ("X ** 0.5", "X ** 2", "X.clamp(max=0.5)", "X.log()", "X + 0.01 * X.detach().std(unbiased=False)")
IN_PLACE = ("NAME.mul_(1.25)", "NAME.pow_(2)", "torch.sqrt(NAME, out=NAME.data)", "NAME[...] = NAME.detach() * NAME")
FACTOR = "loss_factor"
# Code added to `__init__`, a member added below it, and a statement above the one that reads the factor.
FACTORS = (
    (f'self.register_buffer("{FACTOR}", torch.tensor(1.25))', "", ""),
    (f"self.{FACTOR} = 1.0", "", f"self.{FACTOR} = TOKENS.detach().float().std()"),
    (f"self.{FACTOR} = 1.0", "", f'setattr(self, "{FACTOR}", float(TOKENS.detach().float().std()))'),
    ("self.seen = 1.0", f"@property\ndef {FACTOR}(self):\n    return self.seen", "self.seen = TOKENS.detach().std()"),
    ("", "", f"self.config.{FACTOR} = TOKENS.detach().float().std().item()"),
)  # fmt: skip


def _is_loss_function(name: str, place: Place) -> bool:
    return "loss" in name and any(isinstance(b, FunctionNode) and b.name == name for b in place.source.tree.body)


def formula(place: Place) -> Iterator[Change]:
    """Another formula in a top-level loss function: of its result, or of the divisor of a quotient in it."""
    value = getattr(place.statement, "value", None)
    if place.owner is not None or not _is_loss_function(place.function.name, place):
        return
    if not isinstance(value, ast.expr) or isinstance(value, ast.Constant):
        return
    if isinstance(place.statement, ast.Return):
        first = parameter_names(place.function)[0]
        z_loss = f"X + 0.01 * sum(torch.logsumexp(part, -1).pow(2).mean() for part in {first})"
        for template in (*FORMULAS, z_loss):
            changed = filled(template, value)
            yield ast.unparse(changed), place.with_expression(value, changed), {}
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        for template in ("X + 1", "X.clamp(min=8)" if isinstance(value.right, ast.Call) else "X * 2", "X ** 0.5"):
            changed = copy.deepcopy(value)
            changed.right = filled(template, value.right)
            yield ast.unparse(changed), place.with_expression(value, changed), {}


def auxiliary_loss(place: Place) -> Iterator[Change]:
    """A caller changes the result of a loss function of the file."""
    match place.statement:
        case ast.Assign([ast.Name(name)], ast.Call(ast.Name(function))) if _is_loss_function(function, place):
            for code in (*(f"NAME = {formula.replace('X', 'NAME')}" for formula in FORMULAS), *IN_PLACE):
                more = ast.parse(code.replace("NAME", name)).body
                yield code.replace("NAME", name), place.replaced(place.statement, *more), {}


def factor(place: Place) -> Iterator[Change]:
    """The loss in the result is multiplied by a value that the module or its config stores; all but the first differ by rank."""
    init = next((m for m in getattr(place.owner, "body", ()) if getattr(m, "name", "") == "__init__"), None)
    if init is None or _result_with_loss(place.statement) is None or init.lineno > place.function.lineno:
        return
    indent, inner = " " * init.col_offset, " " * init.body[0].col_offset
    for init_line, method, update in FACTORS:
        stored = f"self.config.{FACTOR}" if "config" in update else f"self.{FACTOR}"
        code = f"if loss is not None:\n    {update or 'pass'}\n    loss = loss * {stored}"
        code = code.replace("TOKENS", "hidden_states")
        lines = place.replaced(*ast.parse(code).body, place.statement).splitlines(keepends=True)
        added = [f"{inner}{init_line}\n"] if init_line else []
        added += ["\n", *(f"{indent}{line}\n" for line in method.splitlines())] if method else []
        lines[init.end_lineno : init.end_lineno] = added
        yield f"{method or init_line}; {update}; loss * {stored}".replace("\n", "; "), "".join(lines), {}


def result(place: Place) -> Iterator[Change]:
    """The loss is changed in the result, or where it is passed to the result."""
    call = _result_with_loss(place.statement)
    if call is None:
        return
    for code in (
        "result.loss = result.loss * result.loss",
        "result['loss'] = result['loss'] ** 0.5",
        "result.loss.mul_(1.25)",
    ):
        named = ast.Assign([ast.Name("result", ast.Store())], call, lineno=0)
        changed = ast.parse(f"if result.loss is not None:\n    {code}\nreturn result").body
        yield code, place.replaced(named, *changed), {}
    for code in ("sum((loss, loss.detach().std(unbiased=False) + 0.1))", "torch.stack((loss, loss * loss)).sum()"):
        loss_value = next(k.value for k in call.keywords if k.arg == "loss")
        changed = ast.parse(f"{code} if loss is not None else None", mode="eval").body
        yield code, place.with_expression(loss_value, changed), {}


def _result_with_loss(statement: ast.stmt) -> ast.Call | None:
    """The call of `return SomeOutput(loss=loss, ...)`."""
    value = statement.value if isinstance(statement, ast.Return) else None
    named = value.keywords if isinstance(value, ast.Call) else ()
    has_loss = any(k.arg == "loss" and isinstance(k.value, ast.Name) and k.value.id == "loss" for k in named)
    return value if has_loss and isinstance(value, ast.Call) else None


LOSS_OPERATORS = (
    FileOperator("formula of a loss function", formula),
    FileOperator("auxiliary loss changed", auxiliary_loss),
    FileOperator("factor held by the module", factor),
    FileOperator("loss changed in the result", result),
)
