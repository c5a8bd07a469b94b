"""Operators on statements: dropped, repeated, swapped, moved down; a branch, an early return, a residual, a loss term."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from patchgen.anatomy.classes import dotted
from patchgen.mutation.edits import Mutant, Place, stored_names

Change = tuple[list[ast.stmt], int]  # new statements, and how many they replace


@dataclass(frozen=True)
class StatementOperator:
    """A change of statements, from a place on."""

    name: str
    changes: Callable[[Place], Iterator[Change]]
    keeps_meaning: bool = False

    def mutants(self, place: Place) -> Iterator[Callable[[], Mutant]]:
        for new, span in self.changes(place):
            yield lambda new=new, span=span: self._mutant(place, new, span)

    def _mutant(self, place: Place, new: list[ast.stmt], span: int) -> Mutant:
        old = "; ".join(ast.unparse(node).split("\n")[0] for node in place.body[place.index : place.index + span])
        change = f"{old} -> {'; '.join(ast.unparse(ast.fix_missing_locations(node)) for node in new) or 'nothing'}"
        text = place.replaced(*new, span=span)
        return Mutant(self.name, place.where, change.replace("\n", "; "), text, self.keeps_meaning)


def _parsed(code: str) -> list[ast.stmt]:
    return ast.parse(code).body


def dropped(place: Place) -> Iterator[Change]:
    if isinstance(place.statement, ast.Assign | ast.AugAssign | ast.Expr | ast.If):
        yield [], 1


def repeated(place: Place) -> Iterator[Change]:
    if isinstance(place.statement, ast.Assign | ast.AugAssign | ast.Expr):
        yield [place.statement, copy.deepcopy(place.statement)], 1


def swapped(place: Place) -> Iterator[Change]:
    """The statement and the next one of its block change places."""
    if place.index + 1 < len(place.body) and not isinstance(place.body[place.index + 1], ast.Return):
        yield [place.body[place.index + 1], place.statement], 2


def moved_down(place: Place) -> Iterator[Change]:
    """The statement runs after all that follow it in its block, but above a final return, raise or continue."""
    following = place.body[place.index + 1 :]
    while following and isinstance(following[-1], ast.Return | ast.Raise | ast.Continue):
        following = following[:-1]
    if len(following) > 1 and isinstance(place.statement, ast.Assign | ast.AugAssign | ast.Expr):
        yield [*following, place.statement], len(following) + 1


def _assigned(place: Place) -> tuple[str, ast.expr] | tuple[None, None]:
    """The name and the value of `name = value`."""
    match place.statement:
        case ast.Assign([ast.Name(name)], value):
            return name, value
        case _:
            return None, None


def branched(place: Place) -> Iterator[Change]:
    """An assigned value is changed under a condition on its shape, which every case of a proof meets."""
    name, _ = _assigned(place)
    if name is not None:
        yield [place.statement, *_parsed(f"if {name}.shape[0] >= 1:\n    {name} = {name} * 1.25")], 1


def in_training(place: Place) -> Iterator[Change]:
    name, _ = _assigned(place)
    if name is not None and place.owner is not None:
        yield [place.statement, *_parsed(f"if self.training:\n    {name} = {name} * 1.25")], 1


def early_return(place: Place) -> Iterator[Change]:
    """In training, the method returns here what it returns at its end."""
    last = place.function.body[-1]
    if isinstance(last, ast.Return) and place.statement is not last and place.owner is not None:
        yield [ast.If(ast.parse("self.training", mode="eval").body, [copy.deepcopy(last)], []), place.statement], 1


def in_place(place: Place) -> Iterator[Change]:
    """`x *= 1.25` below the statement that assigns x."""
    name, _ = _assigned(place)
    if name is not None:
        yield [place.statement, *_parsed(f"{name} *= 1.25")], 1


def residual(place: Place) -> Iterator[Change]:
    """The first argument of a call is added, scaled, to the assigned result: a residual."""
    name, value = _assigned(place)
    if name is not None and isinstance(value, ast.Call):
        for argument in value.args[:1]:
            if isinstance(argument, ast.Name):
                yield [place.statement, *_parsed(f"{name} = {name} + 0.5 * {argument.id}")], 1


def layer_skipped(place: Place) -> Iterator[Change]:
    """In training, a loop over layers skips the second one."""
    loop = place.statement
    if isinstance(loop, ast.For) and "layers" in ast.unparse(loop.iter):
        changed = copy.deepcopy(loop)
        test = ast.parse("self.training and num_layers_seen == 2", mode="eval").body
        changed.body = [*_parsed("num_layers_seen += 1"), ast.If(test, [ast.Continue()], []), *changed.body]
        yield [*_parsed("num_layers_seen = 0"), changed], 1


def second_loss(place: Place) -> Iterator[Change]:
    """The loss of a second head, on scaled logits."""
    name, value = _assigned(place)
    if name == "loss" and isinstance(value, ast.Call) and "loss_function" in dotted(value):
        call = copy.deepcopy(value)
        again = ast.Assign([ast.Name("second_loss", ast.Store())], _scaled_logits(call), lineno=0)
        yield [place.statement, again, *_parsed("loss = loss + 0.3 * second_loss")], 1


def _scaled_logits(call: ast.Call) -> ast.Call:
    class Scale(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.parse("logits * 0.5", mode="eval").body if node.id == "logits" else node

    return Scale().visit(call)


def loss_term(place: Place) -> Iterator[Change]:
    """A mean square over all tokens is added to a loss."""
    name, value = _assigned(place)
    if name is None or "loss" not in name or isinstance(value, ast.Constant):
        return
    assigned = stored_names(place.function)
    for other in ("logits", "hidden_states"):
        if other in assigned:
            term = f"{name} = {name} + 0.01 * {other}.float().pow(2).mean()"
            yield [place.statement, *_parsed(term)], 1


def via_name(place: Place) -> Iterator[Change]:
    """The value is assigned to a local name first."""
    statement = place.statement
    if isinstance(statement, ast.Assign | ast.Return) and isinstance(statement.value, ast.Call | ast.BinOp):
        changed = copy.deepcopy(statement)
        changed.value = ast.Name("value_so_far", ast.Load())
        named = ast.Assign([ast.Name("value_so_far", ast.Store())], statement.value, lineno=0)
        yield [named, changed], 1


def annotated(place: Place) -> Iterator[Change]:
    name, value = _assigned(place)
    if name is not None:
        target, kind = ast.Name(name, ast.Store()), ast.parse("torch.Tensor", mode="eval").body
        yield [ast.AnnAssign(target, kind, value, simple=1)], 1


def in_a_block(place: Place) -> Iterator[Change]:
    """The statement runs under a condition that is always true."""
    if isinstance(place.statement, ast.Assign | ast.AugAssign) and place.owner is not None:
        yield [ast.If(ast.parse("self is not None", mode="eval").body, [place.statement], [])], 1


STATEMENT_OPERATORS = (
    StatementOperator("statement dropped", dropped),
    StatementOperator("statement repeated", repeated),
    StatementOperator("statements swapped", swapped),
    StatementOperator("statement moved down", moved_down),
    StatementOperator("residual", residual),
    StatementOperator("layer skipped", layer_skipped),
    StatementOperator("loss of a second head", second_loss),
    StatementOperator("branch by shape", branched),
    StatementOperator("branch in training", in_training),
    StatementOperator("early return", early_return),
    StatementOperator("changed in place", in_place),
    StatementOperator("term of the loss", loss_term),
    StatementOperator("value by a name", via_name, keeps_meaning=True),
    StatementOperator("annotated", annotated, keeps_meaning=True),
    StatementOperator("below a condition", in_a_block, keeps_meaning=True),
)
