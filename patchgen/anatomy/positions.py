"""Which positions a forward uses by default."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import copy

from patchgen.anatomy.classes import (
    FunctionNode,
    base_name,
    calls,
    defaults_of,
    inlined,
    is_in_place,
    plain_assignments,
    stored,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names

POSITIONS = "position_ids"
STACKED = (f"{POSITIONS}.ndim == 3", f"{POSITIONS}.shape[0] == 4")  # tests for one row of positions per dimension


def counts_default(anatomy: Anatomy, forward: FunctionNode) -> bool:
    """Whether a forward that is called without positions counts `0, 1, 2, ...` on from a cache, or sets none at all.

    False if it changes positions by anything but plain assignments in `if position_ids is None:` and, elsewhere, reshapes,
    the choice of rows of stacked positions, and joining on to the positions of a cache. Aliases of the positions count too.
    """
    forward = _with_one_name(forward)
    nodes, bound = list(walk(forward)), stored(forward)
    above = {name: value for name, value in defaults_of(forward).items() if ast.unparse(value) == "0"}  # no cache
    above |= {name: value for name, value in plain_assignments(forward.body).items() if bound.count(name) == 1}
    known: set[ast.AST] = set()
    for branch in (node for node in nodes if isinstance(node, ast.If)):
        test = ast.unparse(branch.test)
        if test == f"{POSITIONS} is None" and branch in forward.body:
            values: dict[str, ast.expr] = dict(above)
            for node in branch.body:
                if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                    return False
                values |= {name: inlined(node.value, values) for name in stored(node)}
            if POSITIONS in values and not _is_arange(anatomy, forward, _without_reshapes(values[POSITIONS])):
                return False
            known |= {node for statement in branch.body for node in walk(statement)}
        known |= {target for node in branch.body if (target := _kept(node, test))}
    known |= {target for node in nodes if (target := _kept(node))}
    written = [n for n in nodes if isinstance(getattr(n, "ctx", None), ast.Store | ast.Del) and n not in known]
    written += [call.func for call in calls(forward) if is_in_place(call.func)]
    return all(base_name(node) != POSITIONS for node in written)


def _kept(node: ast.AST, test: str = "") -> ast.Name | None:
    """The target of an assignment to the positions that, where this test holds, keeps how they count: a reshape, a choice of
    rows of [4, B, S], or joining on to the positions of an earlier call."""
    match node:
        case ast.Assign([ast.Name(name) as target], ast.Subscript(of)) if test.startswith(STACKED):
            pass
        case ast.Assign([ast.Name(name) as target], ast.Call(_, [ast.List([cached, of])])) if (
            test == f"{ast.unparse(cached)} is not None"
        ):
            pass
        case ast.Assign([ast.Name(name) as target], value):
            of = _without_reshapes(value)
        case _:
            return None
    return target if name == POSITIONS and isinstance(of, ast.Name) and of.id == POSITIONS else None


def _with_one_name(forward: FunctionNode) -> FunctionNode:
    """The forward with aliases of the positions renamed to `position_ids`: names assigned by `places = position_ids`,
    `places = position_ids if ... else ...` or `places = position_ids or ...`. A copy if there are any."""
    names = {POSITIONS}
    for node in walk(forward):  # an alias of an alias comes later
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=value):
                parts = [value]
                parts += [value.body, value.orelse] if isinstance(value, ast.IfExp) else []
                parts += value.values if isinstance(value, ast.BoolOp) else []
                names |= {name} if any(isinstance(p, ast.Name) and p.id in names for p in parts) else set()
    if len(names) == 1:
        return forward
    renamed = copy.deepcopy(forward)
    for node in ast.walk(renamed):
        if isinstance(node, ast.Name) and node.id in names:
            node.id = POSITIONS
    return renamed


def _is_arange(anatomy: Anatomy, forward: FunctionNode, value: ast.expr) -> bool:
    """Whether an expression is `torch.arange(S)`, from 0 or the length of a cache."""
    match value:
        case ast.Call(function, [*start, _], keywords) if {key.arg for key in keywords} <= {"device", "dtype"}:
            is_arange = anatomy.names.resolve(function, local_names(forward)) == "torch.arange"
            return is_arange and all(map(_is_start, start))
    return False


def _without_reshapes(value: ast.expr) -> ast.expr:
    """An expression without its reshapes, repeats along rows, and the length of a cache added to it."""
    match value:
        case (
            ast.Call(ast.Attribute(inner, "expand"))
            | ast.Call(ast.Attribute(inner, "unsqueeze"), [ast.Constant(0)])
            | ast.Call(ast.Attribute(inner, "repeat"), [_, *_, ast.Constant(1)])
        ):
            return _without_reshapes(inner)
        case ast.Call(ast.Attribute(inner, "view"), [*rows, ast.UnaryOp(ast.USub(), ast.Constant(1))]):
            return _without_reshapes(inner) if all(ast.unparse(row) == "1" for row in rows) else value
        case ast.Subscript(inner, index) if ast.unparse(index) == "(None, ...)":
            return _without_reshapes(inner)
        case ast.BinOp(inner, ast.Add(), past) if _is_start(past):
            return _without_reshapes(inner)
    return value


def _is_start(length: ast.expr) -> bool:
    """Whether an expression is 0 or the length of a cache (`get_seq_length`)."""
    match length:
        case ast.IfExp(_, if_true, if_false):
            return _is_start(if_true) and _is_start(if_false)
        case ast.Constant(0) | ast.Call(ast.Attribute(_, "get_seq_length")):
            return True
    return False
