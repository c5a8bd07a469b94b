"""Cross entropies that a head computes itself, recognised by the expression that its statements amount to.

    aligned    `CrossEntropyLoss()(logits.view(-1, V), labels.view(-1))`: logits and labels of the same position
    shifted    the same of `logits[..., :-1, :]` and `labels[..., 1:]`, perhaps of only those that a mask keeps

The statements are inlined into one expression. A loss with anything unknown in it is not read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

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
ALL_TOKENS = re.compile(r"-1|(?P<of>.+)\.shape\[0\] \* (?P=of)\.shape\[1\]")  # the first size of a reshape
CAST_BACK = re.compile(r"(?P<name>\w+) = (?P=name)\.to\(\w+\.dtype\)")
MOVED = re.compile(r"\.to\(\w+\.device\)")
TO_FP32 = ".to(torch.float32)"
# A mask cut to the length of the shifted logits: `mask[:, -(logits.shape[1] - 1):]`, `mask[:, -<cut logits>.shape[1]:]`.
CUT_MASK = re.compile(r"(?P<name>\w+)\[:, -(\((?P<logits>\w+)\.shape\[1\] - 1\)|(?P<cut>.+)\.shape\[1\]):\]")


@dataclass(frozen=True)
class OwnLoss:
    """A cross entropy that was read, by the names of its loss, logits and labels."""

    loss: str
    logits: str
    labels: str
    form: str  # `ALIGNED` or `SHIFTED`
    vocab_size: str  # V as source; "None" for the width of the logits
    mask: str  # the name of the mask of the tokens that count; "" where all do
    upcast: bool  # whether the statements cast the logits to fp32 under their own name


def read_own_loss(body: Sequence[ast.stmt], anatomy: Anatomy, local: Container[str]) -> OwnLoss | None:
    """The cross entropy that the last statement of `body` assigns; None where it is not known to be one of these forms."""
    choice = next((node for node in body if isinstance(node, ast.If)), None)
    if choice is None:
        found = _read(body, anatomy, local)
        return found if found is not None and not found.mask else None
    place, sides = body.index(choice), (choice.body, choice.orelse)
    masked, plain = (_read([*body[:place], *side, *body[place + 1 :]], anatomy, local) for side in sides)
    if masked is None or plain is None or plain.mask or ast.unparse(choice.test) != f"{masked.mask} is not None":
        return None
    return masked if replace(plain, mask=masked.mask) == masked else None


def _read(body: Sequence[ast.stmt], anatomy: Anatomy, local: Container[str]) -> OwnLoss | None:
    """The same of assignments alone, of the tokens that a mask keeps too. Casts of the result to the model's dtype are left out."""
    names, loss = dict[str, ast.expr](), ""
    while body and CAST_BACK.fullmatch(ast.unparse(body[-1])):
        body = body[:-1]
    for node in body:
        match node:
            case ast.Assign(
                [ast.Tuple([ast.Name(), ast.Name(), ast.Name()] as sizes)], ast.Attribute(attr="shape") as shape
            ):
                of = inlined(shape, names)
                names |= {
                    ast.unparse(n): ast.Subscript(of, ast.Constant(i)) for n, i in zip(sizes, (0, 1, -1), strict=True)
                }
            case ast.Assign([ast.Name(loss)], value):
                names[loss] = inlined(value, names)
            case _:
                return None
    operands = _operands(names.get(loss), anatomy, local)
    if operands is None:
        return None
    (logits, size), (labels, flattened) = _flat(operands[0], 2), _flat(operands[1], 1)
    made = {name: ast.unparse(value).replace(TO_FP32, ".float()") for name, value in names.items()}
    upcast = next((name for name, value in made.items() if value == f"{name}.float()"), "")
    texts = [MOVED.sub("", ast.unparse(one)).replace(TO_FP32, ".float()") for one in (logits, labels)]
    texts = [text.replace(f"{upcast}.float()", upcast or ".float()") for text in texts]
    found = _tokens(*texts) if size and flattened else None
    if found is None or (upcast and upcast != found[0]):
        return None
    name, target, form, mask = found
    if _is_width(size, name):
        size = "None"
    is_known = size == "None" or set(loaded(ast.parse(size))) <= {"self"}
    bound = names.keys() - {loss, target, *([name] if upcast else [])}
    if not is_known or {name, target, mask} & bound or not _is_unchanged(names.get(target), target):
        return None
    return OwnLoss(loss, name, target, form, size, mask, bool(upcast))


def _operands(value: ast.expr | None, anatomy: Anatomy, local: Container[str]) -> list[ast.expr] | None:
    """The logits and labels of a mean cross entropy that ignores -100; None for anything else."""
    match value:
        case ast.Call(ast.Call(function, [], options), [logits, labels], []):
            known = LOSS_CLASS
        case ast.Call(function, [logits, labels], options):
            known = LOSS_FUNCTION
        case _:
            return None
    asked = {f"{one.arg}={ast.unparse(one.value)}" for one in options}
    is_mean = asked <= {"ignore_index=-100", "reduction='mean'"}
    return [logits, labels] if is_mean and anatomy.names.resolve(function, local) == known else None


def _flat(node: ast.expr, dimensions: int = 0) -> tuple[ast.expr, str]:
    """An expression without reshapes to `dimensions`, moves to a device and `contiguous()`, and the size of the last
    dimension after a reshape as source; "" without one."""
    size = ""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
        given = [ast.unparse(one) for one in node.args]
        is_view = node.func.attr in ("view", "reshape") and len(given) == dimensions
        is_view &= bool(ALL_TOKENS.fullmatch("".join(given[:1])))
        is_view |= node.func.attr == "flatten" and given == ([] if dimensions == 1 else ["0", "1"])
        is_moved = node.func.attr == "to" and len(given) == 1 and getattr(node.args[0], "attr", "") == "device"
        if is_view and not size:
            size = "None" if node.func.attr == "flatten" else given[-1]
        elif not is_moved and not (node.func.attr == "contiguous" and not given):
            break
        node = node.func.value
    return node, size


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
        case ast.Call(ast.Attribute(of, "contiguous" | "float" | "to")) | ast.Subscript(of, ast.Compare()):
            return _is_of_tokens(of, logits)
        case ast.Subscript(of, place) if WITHOUT_LAST.fullmatch(ast.unparse(ast.Subscript(ast.Name(logits), place))):
            return _is_of_tokens(of, logits)
        case _:
            return isinstance(tensor, ast.Name) and tensor.id == logits


def _tokens(logits: str, labels: str) -> tuple[str, str, str, str] | None:
    """The names of logits and labels, the form, and the name of the mask, from logits and labels as source; None if unknown."""
    if logits.isidentifier() and labels.isidentifier():
        return logits, labels, ALIGNED, ""
    first, second = WITHOUT_LAST.fullmatch(logits), WITHOUT_FIRST.fullmatch(labels)
    if first and second:
        return first["name"], second["name"], SHIFTED, ""
    match ast.parse(logits, mode="eval").body, ast.parse(labels, mode="eval").body:
        case ast.Subscript(cut, kept), ast.Subscript(targets, chosen):
            known = _tokens(ast.unparse(cut), ast.unparse(targets))
            mask = _mask(kept, known[0]) if known else ""
            if known and known[2:] == (SHIFTED, "") and mask and mask == _mask(chosen, known[0]):
                return (*known[:3], mask)
        case _:
            pass
    return None


def _mask(kept: ast.expr, logits: str) -> str:
    """The name of the mask in `mask[..., 1:] != 0`; "" for any other expression."""
    match kept:
        case ast.Compare(left, [ast.NotEq()], [ast.Constant(0)]):
            text = ast.unparse(_flat(left)[0])
            plain, cropped = WITHOUT_FIRST.fullmatch(text), CUT_MASK.fullmatch(text)
            if cropped and cropped["logits"] != logits and not WITHOUT_LAST.fullmatch(cropped["cut"] or "-"):
                return ""
            found = plain or cropped
            return found["name"] if found else ""
        case _:
            return ""


def _is_unchanged(value: ast.expr | None, name: str) -> bool:
    """Whether a name still holds the same values, perhaps on another device."""
    return value is None or ast.unparse(_flat(value)[0]) == name


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
        built = (build.target or "" for build in anatomy.builds(owner) if attribute == build.attribute)
        held += [anatomy.method(target, "forward") for target in built]
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
