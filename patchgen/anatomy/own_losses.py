"""Cross entropies that a head computes itself, recognised by the expression that its statements amount to.

    aligned    `CrossEntropyLoss()(logits.view(-1, V), labels.view(-1))`: logits and labels of the same position
    shifted    the same of `logits[..., :-1, :]` and `labels[..., 1:]`, perhaps of only those that a mask keeps

The statements are inlined into one expression. A loss with anything unknown in it is not read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

from patchgen.anatomy.classes import (
    FunctionNode,
    calls,
    inlined,
    loaded,
    own_attribute,
    parameter_names,
    plain_assignments,
    stored,
    walk,
)
from patchgen.anatomy.graph import Anatomy

ALIGNED, SHIFTED = "aligned", "shifted"
LOSS_CLASS, LOSS_FUNCTION = "torch.nn.CrossEntropyLoss", "torch.nn.functional.cross_entropy"
CROSS_ENTROPIES = {"CrossEntropyLoss", "cross_entropy", "nll_loss", "NLLLoss"}
WITHOUT_LAST = re.compile(r"(?P<name>\w+)\[(\.\.\., :-1, :|:, :-1(, :)?)\]")  # logits without the last token
WITHOUT_FIRST = re.compile(r"(?P<name>\w+)\[(\.\.\.|:), 1:\]")  # labels, or a mask, without the first
# A mask cut to the length of the shifted logits: `mask[:, -(logits.shape[1] - 1):]`, `mask[:, -<cut logits>.shape[1]:]`.
CUT_MASK = re.compile(r"(?P<name>\w+)\[:, -(\((?P<logits>\w+)\.shape\[1\] - 1\)|(?P<cut>.+)\.shape\[1\]):\]")


@dataclass(frozen=True)
class OwnLoss:
    """A cross entropy that was read.

    Attributes:
        loss, logits, labels: their names.
        form: `ALIGNED` or `SHIFTED`.
        vocab_size: V as source; "None" for the width of the logits.
        mask: the name of the mask of the tokens that count; "" where all do.
        upcast: whether the statements cast the logits to fp32 under their own name.
        bound: the other names that the statements bind.
    """

    loss: str
    logits: str
    labels: str
    form: str
    vocab_size: str
    mask: str
    upcast: bool
    bound: frozenset[str]


def read_own_loss(body: Sequence[ast.stmt], anatomy: Anatomy, local: Container[str]) -> OwnLoss | None:
    """The cross entropy that the last statement of `body` assigns; None where it is not known to be one of these forms."""
    names: dict[str, ast.expr] = {}
    if not body or not _follow(body, names):
        return None
    loss = getattr(body[-1].targets[0], "id", "") if isinstance(body[-1], ast.Assign) else ""
    operands = _operands(names.get(loss), anatomy, local)
    if operands is None:
        return None
    logits, size = _flat(operands[0], 2)
    labels, _ = _flat(operands[1], 1)
    upcast = next((name for name, value in names.items() if ast.unparse(value) == f"{name}.float()"), "")
    texts = [ast.unparse(one).replace(f"{upcast}.float()", upcast or ".float()") for one in (*logits, *labels)]
    found = _tokens(texts[: len(logits)], texts[len(logits) :])
    if found is None or (upcast and upcast != found[0]):
        return None
    name, target, form, mask = found
    if _is_width(size, name):
        size = "None"
    is_known = size == "None" or set(loaded(ast.parse(size))) <= {"self"}
    bound = frozenset(names) - {loss, target, *([name] if upcast else [])}
    if not is_known or {name, target, mask} & bound or not _is_unchanged(names.get(target), target):
        return None
    return OwnLoss(loss, name, target, form, size, mask, bool(upcast), bound)


def _follow(body: Sequence[ast.stmt], names: dict[str, ast.expr]) -> bool:
    """Stores the inlined value of each assigned name in `names`; False at a statement that is not understood."""
    for node in body:
        match node:
            case ast.Assign([ast.Name(name)], value):
                names[name] = inlined(value, names)
            case ast.If(test, then, [_, *_] as orelse):
                sides = [dict(names), dict(names)]
                if not _follow(then, sides[0]) or not _follow(orelse, sides[1]):
                    return False
                asked = inlined(test, names)
                for name in sides[0].keys() & sides[1].keys():
                    one, other = (side[name] for side in sides)
                    is_same = ast.unparse(one) == ast.unparse(other)
                    names[name] = one if is_same else ast.IfExp(asked, one, other)
                for name in sides[0].keys() ^ sides[1].keys():
                    names[name] = ast.Name("")  # bound in one branch only
            case _:
                return False
    return True


def _operands(value: ast.expr | None, anatomy: Anatomy, local: Container[str]) -> list[ast.expr] | None:
    """The logits and labels of a mean cross entropy that ignores -100; None for anything else."""
    match value:
        case ast.Call(ast.Call(function, [], options), [logits, labels], []):
            known = LOSS_CLASS
        case ast.Call(function, [logits, labels], options):
            known = LOSS_FUNCTION
        case _:
            return None
    is_plain = all(
        f"{one.arg}={ast.unparse(one.value)}" in ("ignore_index=-100", "reduction='mean'") for one in options
    )
    return [logits, labels] if is_plain and anatomy.names.resolve(function, local) == known else None


def _flat(node: ast.expr, dimensions: int) -> tuple[list[ast.expr], str]:
    """Strips reshapes to `dimensions`, moves to a device and `contiguous()` off an expression.

    Returns:
        What is left, of a choice `a if mask is not None else b` the condition and both sides, empty where nothing flattens
        it (with `dimensions` 0 nothing has to); and the size of the last dimension as source.
    """
    size, flattened = "", False
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
        given = [ast.unparse(one) for one in node.args]
        is_view = node.func.attr in ("view", "reshape") and len(given) == dimensions and given[:1] == ["-1"]
        is_view |= node.func.attr == "flatten" and given == ([] if dimensions == 1 else ["0", "1"])
        is_moved = node.func.attr == "to" and len(given) == 1 and getattr(node.args[0], "attr", "") == "device"
        if is_view and not flattened:
            flattened, size = True, "None" if node.func.attr == "flatten" else given[-1]
        elif not is_moved and not (node.func.attr == "contiguous" and not given):
            break
        node = node.func.value
    if isinstance(node, ast.IfExp):
        sides = [_flat(side, 0)[0] for side in (node.body, node.orelse)]
        return [one for one in (node.test, *sides[0], *sides[1]) if flattened], size
    return [node] if flattened or not dimensions else [], size


def _is_width(size: str, logits: str) -> bool:
    """Whether a size, as source, is that of the logits' last dimension."""
    match ast.parse(size, mode="eval").body:
        case ast.Call(ast.Attribute(tensor, "size"), [last], []) | ast.Subscript(ast.Attribute(tensor, "shape"), last):
            return ast.unparse(last) == "-1" and _is_of_tokens(tensor, logits)
        case _:
            return False


def _is_of_tokens(tensor: ast.expr, logits: str) -> bool:
    """Whether a tensor is the logits of all tokens, of all but the last, or of the tokens that a mask keeps."""
    match tensor:
        case ast.IfExp(_, one, other):
            return _is_of_tokens(one, logits) and _is_of_tokens(other, logits)
        case ast.Call(ast.Attribute(of, "contiguous" | "float" | "to")) | ast.Subscript(of, ast.Compare()):
            return _is_of_tokens(of, logits)
        case ast.Subscript(of, place) if WITHOUT_LAST.fullmatch(ast.unparse(ast.Subscript(ast.Name(logits), place))):
            return _is_of_tokens(of, logits)
        case _:
            return isinstance(tensor, ast.Name) and tensor.id == logits


def _tokens(logits: list[str], labels: list[str]) -> tuple[str, str, str, str] | None:
    """The names of logits and labels, the form, and the name of the mask, from the parts of `_flat`; None if unknown."""
    match logits, labels:
        case [str(one)], [str(other)]:
            if one.isidentifier() and other.isidentifier():
                return one, other, ALIGNED, ""
            first, second = WITHOUT_LAST.fullmatch(one), WITHOUT_FIRST.fullmatch(other)
            return (first["name"], second["name"], SHIFTED, "") if first and second else None
        case [str(asked), str(kept), str(one)], [str(same), str(chosen), str(other)] if asked == same:
            name, label, form, _ = _tokens([one], [other]) or ("", "", "", "")
            mask = _mask(kept, one, name)
            is_known = form == SHIFTED and mask and mask == _mask(chosen, other, name)
            return (name, label, form, mask) if is_known and asked == f"{mask} is not None" else None
        case _:
            return None


def _mask(kept: str, cut: str, logits: str) -> str:
    """The name of the mask in `cut[mask[..., 1:] != 0]`; "" for any other expression."""
    node = ast.parse(kept, mode="eval").body
    if not isinstance(node, ast.Subscript) or ast.unparse(node.value) != cut:
        return ""
    match node.slice:
        case ast.Compare(left, [ast.NotEq()], [ast.Constant(0)]):
            text = ast.unparse(_flat(left, 0)[0][0])
            plain, cropped = WITHOUT_FIRST.fullmatch(text), CUT_MASK.fullmatch(text)
            if cropped and cropped["logits"] != logits and not WITHOUT_LAST.fullmatch(cropped["cut"] or "-"):
                return ""
            found = plain or cropped
            return found["name"] if found else ""
        case _:
            return ""


def _is_unchanged(value: ast.expr | None, name: str) -> bool:
    """Whether a name still holds the same values, perhaps on another device."""
    return value is None or [ast.unparse(one) for one in _flat(value, 0)[0]] == [name]


def handed_on(forward: FunctionNode) -> ast.Call | None:
    """The call of the inner model whose loss a head returns unchanged, with the caller's labels and keyword arguments.

    None where the head's loss is another.
    """
    read = [n for n in walk(forward) if isinstance(n, ast.Attribute) and n.attr == "loss"]
    results = [n.value for n in walk(forward) if isinstance(n, ast.Return)]
    if len(read) != 1 or len(results) != 1 or not isinstance(results[0], ast.Call) or stored(forward).count("labels"):
        return None
    holder = getattr(read[0].value, "id", "")
    made = [n for n in walk(forward) if isinstance(n, ast.Assign | ast.AnnAssign) and holder in stored(n)]
    call = made[0].value if len(made) == 1 and stored(forward).count(holder) == 1 else None
    if not isinstance(call, ast.Call) or not own_attribute(call.func) or forward.args.kwarg is None:
        return None
    is_returned = any(one.arg == "loss" and one.value is read[0] for one in results[0].keywords)
    handed = {(one.arg, ast.unparse(one.value)) for one in call.keywords}
    whole = {("labels", "labels"), (None, forward.args.kwarg.arg)}
    return call if is_returned and whole <= handed and "labels" in parameter_names(forward) else None


def unserved_loss(forward: FunctionNode, owner: str, anatomy: Anatomy) -> ast.AST | None:
    """The code of a head's loss that is neither transformers' nor of a known form; None where none is found.

    That is a call, with the labels, of a method or module that computes a cross entropy; or the inner model's call
    (`handed_on`); or the expression that computes the loss.
    """
    operations = anatomy.names.operations
    if any(own_attribute(call.func) == "loss_function" for call in calls(forward)):  # transformers'
        return None
    for call in calls(forward):
        given = [*call.args, *(one.value for one in call.keywords)]
        attribute = own_attribute(call.func) if any("labels" in loaded(one) for one in given) else None
        held = [anatomy.method(owner, attribute)] if attribute else []
        held += [
            anatomy.method(build.target or "", "forward")
            for build in anatomy.builds(owner)
            if attribute == build.attribute
        ]
        if any(operations(one[1]) & CROSS_ENTROPIES for one in held if one):
            return call
    if not operations(forward) & CROSS_ENTROPIES:
        return handed_on(forward)
    results = {ast.unparse(one.value) for call in calls(forward) for one in call.keywords if one.arg == "loss"}
    assigned = [n for n in walk(forward) if isinstance(n, ast.Assign)]
    made = [n.value for n in assigned if results & set(stored(n)) and not isinstance(n.value, ast.Constant)]
    values = plain_assignments(assigned).items()
    functions = {n: v for n, v in values if isinstance(v, ast.Call) and anatomy.names.operation(v) in CROSS_ENTROPIES}
    computing = (call for call in calls(forward) if operations(call) & CROSS_ENTROPIES)
    return inlined(made[-1] if made else next(computing), functions)
