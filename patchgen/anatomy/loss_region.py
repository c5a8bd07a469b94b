"""Where a head computes its loss: the statements from its first logits to the loss, and what they read.

The seam replaces these statements. Whether the result computes what upstream computes is what the proof says, in one process, in
chunks of tokens and on ranks.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from patchgen.anatomy.classes import FunctionNode, arguments, calls, loaded, own_attribute, stored, walk
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.library_losses import library_form
from patchgen.anatomy.names import local_names, uses_name
from patchgen.anatomy.own_losses import ALIGNED, OwnLoss, read_own_loss
from patchgen.errors import Missed
from patchgen.rewrite import Editor

LOSS_PARAMETERS = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
"""The parameters of transformers' losses of language models, in order; any further ones are passed by keyword."""
LIBRARY_LOSS = "self.loss_function"


@dataclass(frozen=True)
class LossCall:
    """The function that computes the loss, the names that it reads and sets, and its further arguments."""

    function: str
    form: str  # `own_losses.ALIGNED`, or `SHIFTED` of a cross entropy that the head writes out; "" where the function shifts
    loss: str
    logits: str
    labels: str
    arguments: list[str]
    further: tuple[ast.If, ...] = ()  # `if self.coefficient > 0:` below the loss, which may read the logits

    @property
    def switches(self) -> str:
        """The condition that one of `further` runs, as source; empty without any."""
        return " or ".join(ast.unparse(node.test) for node in self.further)


@dataclass(frozen=True)
class LossRegion:
    """The statements from the first assignment of the logits to the one that computes the loss, at `end` of the body."""

    end: int
    call: LossCall
    first: ast.stmt  # `logits = self.lm_head(hidden_states)`, or an `if` and `else` that make them
    from_parameter: str  # source of `first`, reading the parameter of the head's function
    inside: list[ast.stmt]  # the statements after it that go into the head's function
    outside: list[ast.stmt]  # those that go above the seam, `loss = None` left out
    projected: str  # the right-hand side of `first`
    module: str  # `self.lm_head`
    hidden_states: str  # its argument

    @property
    def parameter(self) -> str:
        """The name of the parameter of the head's function."""
        return self.hidden_states if self.hidden_states.isidentifier() else "hidden_states"


def find_region(editor: Editor, forward: FunctionNode, owner: str, anatomy: Anatomy) -> LossRegion:
    """The region of a head's forward; raises Missed if it has none of the known forms."""
    body, code = forward.body, editor.code
    end, call = _find_loss(editor, forward, anatomy)
    logits = call.logits
    values = ((i, node, _made_value(node, logits)) for i, node in enumerate(body[:end]))
    start, first, projected = next((found for found in values if found[2] is not None), (end, body[end], None))
    if projected is None:
        raise Missed(f"an assignment of `{logits}` above the loss", code(body[end]))
    found = _projection(projected) or _made_elsewhere(projected, body[:start])
    if found is None:
        raise Missed(f"`{logits} = self.<projection>(hidden states)`", code(first))
    module, hidden = found
    read, source = set(loaded(hidden)) - {"self"}, code(hidden)
    if isinstance(first, ast.If) and len(read) == 1:  # both branches read it, perhaps in different expressions
        (source,) = read
    given = source if isinstance(first, ast.If) or source.isidentifier() else "hidden_states"
    from_parameter = code(first) if given == source else code(first, instead=(hidden, given))
    between = [node for node in body[start + 1 : end] if not _is_unset(node, call.loss)]
    inside = [node for i, node in enumerate(between) if _makes(node, logits, between[i + 1 :])]
    outside = [node for node in between if node not in inside]
    # The function that makes logits binds names of its own: what they hold would be lost to other code.
    if lost := (set(stored(first, *inside)) - {logits}) & {call.labels, *loaded(*body[:start], *outside, *body[end:])}:
        raise Missed(
            f"logits made without a new value of {', '.join(sorted(lost))}, which other code reads", code(first)
        )
    if call.function == LIBRARY_LOSS and not _reads(body[:end], call.labels):
        call = replace(call, form=library_form(owner, anatomy))
    return LossRegion(end, call, first, from_parameter, inside, outside, code(projected), module, source)


def _find_loss(editor: Editor, forward: FunctionNode, anatomy: Anatomy) -> tuple[int, LossCall]:
    """The position of the `if` that computes the loss where there are labels, and the call."""
    body, local = forward.body, local_names(forward)
    for place, node in enumerate(body):
        if not isinstance(node, ast.If):
            continue
        made = next(filter(None, map(_assigned_call, node.body)), None)
        if made is not None:
            logits, labels, rest = _loss_arguments(editor, made[1], forward)
            further = [one for one in node.body[1:] if _is_switched(one)]
            alone = _assigned_call(node.body[0]) == made and len(further) == len(node.body) - 1
            call = LossCall(LIBRARY_LOSS, "", made[0], logits, labels, rest, further=tuple(further))
        elif own := read_own_loss(node.body, anatomy, local):
            call, alone = _own_call(own, body[:place], forward, anatomy), True
        else:
            continue
        if ast.unparse(node.test) != f"{call.labels} is not None" or not alone or node.orelse:
            raise Missed(f"`if {call.labels} is not None:` with the loss alone in it", editor.code(node))
        return place, call
    assigned = sorted((n for n in walk(forward) if isinstance(n, ast.Assign)), key=lambda node: -node.lineno)
    lines = [editor.code(node) for node in assigned if ast.unparse(node.value) != "None"]
    closest = next((line for line in lines if re.match(r"\w*loss\b.*=", line)), editor.code(body[-1]))
    raise Missed("`loss = self.loss_function(...)` under `if labels is not None:`", closest)


def _assigned_call(node: ast.stmt) -> tuple[str, ast.Call] | None:
    """The name and the call of `loss = self.loss_function(...)`."""
    match node:
        case ast.Assign([ast.Name(name), *_], ast.Call() as call) if own_attribute(call.func) == "loss_function":
            return name, call
    return None


def _is_switched(node: ast.stmt) -> TypeGuard[ast.If]:
    """Whether it is `if self.coefficient > 0:`, below the loss: what it adds may read all logits."""
    match node:
        case ast.If(ast.Compare(ast.Attribute() as left, [ast.Gt()], [ast.Constant(0)]), _, []):
            return ast.unparse(left).startswith("self.")
    return False


def _own_call(own: OwnLoss, above: Sequence[ast.stmt], forward: FunctionNode, anatomy: Anatomy) -> LossCall:
    """The seam's call for a cross entropy that the head writes out."""
    rest, form = [f"vocab_size={own.vocab_size}"], own.form
    rest += [f"attention_mask={own.mask}"] if own.mask else []
    rest += ["upcast=True"] if own.upcast else []
    if form == ALIGNED and _reads(above, own.labels):
        form = ""
        rest.append(f"shift_labels={own.labels}")  # the decoder's inputs are made from them, so they are its targets
    elif forward.args.kwarg:
        rest.append(f"**ops.step_labels({forward.args.kwarg.arg})")
    return LossCall(f"ops.{own.form}_cross_entropy", form, own.loss, own.logits, own.labels, rest)


def _reads(body: Sequence[ast.AST], name: str) -> bool:
    """Whether code reads the value of a name, rather than only its shape or whether it is None."""
    for node in body:
        match node:
            case ast.Attribute(attr="device" | "dtype" | "shape") | ast.Call(ast.Attribute(attr="size" | "dim")):
                continue
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                continue
            case ast.Name(known) if known == name:
                return True
        if _reads([*ast.iter_child_nodes(node)], name):
            return True
    return False


def _made_elsewhere(value: ast.expr, above: Sequence[ast.stmt]) -> tuple[str, ast.expr] | None:
    """The head's function and its argument for logits in the result of an inner model: `outputs[0]`, `outputs.logits`."""
    match value:
        case ast.Subscript(ast.Name(name), ast.Constant(0)) | ast.Attribute(ast.Name(name), "logits"):
            match [node for node in above if name in stored(node)]:
                case [ast.Assign(_, ast.Call(function))] if own_attribute(function):
                    return "ops.given_logits", value
    return None


def _loss_arguments(editor: Editor, call: ast.Call, forward: FunctionNode) -> tuple[str, str, list[str]]:
    """The logits, the labels, and the remaining arguments as source, each under the name of its parameter."""
    kwargs, whole = forward.args.kwarg.arg if forward.args.kwarg else "", editor.code(call)
    given = arguments(call, LOSS_PARAMETERS)
    rest = [f"**{kwargs}"] if None in given and ast.unparse(given.pop(None)) == kwargs else []
    num_starred = sum(keyword.arg is None for keyword in call.keywords)
    if (
        num_starred > len(rest)
        or len(given) + num_starred < len(call.args) + len(call.keywords)
        or any(isinstance(value, ast.Starred) for value in given.values())
    ):
        raise Missed(f"self.loss_function({', '.join(LOSS_PARAMETERS)}, **kwargs)", whole)
    named = {name: editor.code(value) for name, value in given.items()}
    if not all(isinstance(given.get(name), ast.Name) for name in ("logits", "labels")):
        raise Missed("self.loss_function(logits, labels, ...) with plain names", whole)
    logits, labels = named.pop("logits"), named.pop("labels")
    if named.get("vocab_size") in (f"{logits}.shape[-1]", f"{logits}.size(-1)"):
        named["vocab_size"] = "None"
    if logits in loaded(*(given[name] for name, source in named.items() if source != "None")):
        raise Missed("arguments that are known above the logits", whole)
    if kwargs and not rest and not named.keys() & {"num_items_in_batch", "shift_labels"}:
        rest = [f"**ops.step_labels({kwargs})"]  # upstream passes nothing of a step: packed rows would leak
    return logits, labels, [*(f"{name}={source}" for name, source in named.items()), *rest]


def _makes(node: ast.stmt, logits: str, later: Sequence[ast.stmt]) -> bool:
    """Whether a statement takes part in making the logits: it uses them, or assigns a name that `later` ones use with them."""
    if uses_name(node, logits):
        return True
    made = [t.id for n in walk(node) if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    return any(uses_name(other, name) and uses_name(other, logits) for other in later for name in made)


def _assigned_value(node: ast.stmt, name: str) -> ast.expr | None:
    """The right-hand side if the statement is a plain assignment to `name`."""
    match node:
        case ast.Assign([ast.Name(found)], value) | ast.AnnAssign(ast.Name(found), _, value) if found == name:
            return value
    return None


def _made_value(node: ast.stmt, name: str) -> ast.expr | None:
    """The right-hand side of an assignment to `name`; if both `if` and `else` end in one, that of the `else`."""
    if isinstance(node, ast.If) and node.orelse:
        found = [_assigned_value(branch[-1], name) for branch in (node.body, node.orelse)]
        return found[1] if None not in found else None
    return _assigned_value(node, name)


def _is_unset(node: ast.stmt, loss: str) -> bool:
    """`loss = None`, annotated or not."""
    value = _assigned_value(node, loss)
    return value is not None and ast.unparse(value) == "None"


def _projection(value: ast.expr) -> tuple[str, ast.expr] | None:
    """The innermost `self.<module>(x)` and its x: everything around it belongs to the head."""
    found = [call for call in calls(value) if own_attribute(call.func) and len(call.args) == 1 and not call.keywords]
    found = sorted(found, key=lambda call: (call.lineno, call.col_offset))
    plain = found and not isinstance(found[-1].args[0], ast.Starred)
    return (ast.unparse(found[-1].func), found[-1].args[0]) if plain else None
