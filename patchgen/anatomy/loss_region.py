"""Where a head computes its loss: the statements from its first logits to the loss, and what they read.

Any other form is refused, with what was expected, so that no loss is taken for another.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from patchgen.anatomy.assignments import values_in
from patchgen.anatomy.classes import (
    FunctionNode,
    arguments,
    calls,
    dotted,
    is_compound,
    loaded,
    own_attribute,
    parameter_names,
    stored,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.hooks import require_plain_calls, require_plain_weights
from patchgen.anatomy.library_losses import library_form
from patchgen.anatomy.loss_terms import LossTerms, is_number
from patchgen.anatomy.names import local_names, uses_name
from patchgen.anatomy.own_losses import ALIGNED, OwnLoss, read_own_loss
from patchgen.anatomy.tokenwise import mixing, stored_names
from patchgen.errors import Missed
from patchgen.rewrite import Editor

LOSS_PARAMETERS = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
"""The parameters of transformers' losses of language models, in order; any further ones are passed by keyword."""
SEAM_PARAMETERS = {"head", "hidden_states", "loss_function", "training", "local_terms", "upcast"}
OWN_LOSSES = {"loss_function", "_loss_function", "__call__"}  # `loss_type` only names one of transformers'
LIBRARY_LOSS = "self.loss_function"
CONFIG = re.compile(r"self\.config(\.\w+)*")
LIBRARIES, MODELS = ("transformers.", "torch.", "typing.", "functools."), "transformers.models."


@dataclass(frozen=True)
class LossCall:
    """The function that computes the loss, the names that it reads and sets, and its further arguments."""

    function: str
    form: str  # `own_losses.ALIGNED`, or `SHIFTED` of a cross entropy that the head writes out; "" where the function shifts
    loss: str
    logits: str
    labels: str
    arguments: list[str]
    bound: frozenset[str] = frozenset()  # the other names that its statements bind
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
    besides: set[str]  # the names that `first` reads besides the argument of the projection
    inside: list[ast.stmt]  # the statements after it that go into the head's function
    outside: list[ast.stmt]  # those that go above the seam, `loss = None` left out
    projected: str  # the right-hand side of `first`
    module: str  # `self.lm_head`
    hidden_states: str  # its argument
    local_terms: tuple[str, ...]  # terms added to the loss below it that are numbers of one rank

    @property
    def parameter(self) -> str:
        """The name of the parameter of the head's function."""
        return self.hidden_states if self.hidden_states.isidentifier() else "hidden_states"


def is_loss_call(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether code is a call of `self.loss_function`, transformers' loss for the class."""
    return isinstance(node, ast.Call) and own_attribute(node.func) == "loss_function"


def _makes(node: ast.stmt, logits: str, later: Sequence[ast.stmt]) -> bool:
    """Whether a statement takes part in making the logits: it uses them, or assigns a name that `later` ones use with them."""
    if uses_name(node, logits):
        return True
    made = [t.id for n in walk(node) if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    return any(uses_name(other, name) and uses_name(other, logits) for other in later for name in made)


def find_region(editor: Editor, forward: FunctionNode, owner: str, anatomy: Anatomy) -> LossRegion:
    """The region of a head's forward; raises Missed if it has none of the known forms."""
    body, code = forward.body, editor.code
    end, call = _find_loss(editor, forward, owner, anatomy)
    logits, labels, loss = call.logits, call.labels, call.loss
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
    besides = {*(Counter(loaded(first)) - Counter(loaded(hidden)))}
    from_parameter = code(first) if given == source else code(first, instead=(hidden, given))
    between = [node for node in body[start + 1 : end] if not _is_unset(node, loss)]
    inside = [node for i, node in enumerate(between) if _makes(node, logits, between[i + 1 :])]
    outside = [node for node in between if node not in inside]
    for node in body[:start]:
        if stored_names(node, {loss}) and not _is_unset(node, loss):
            raise Missed(f"`{loss} = None` as the only value of {loss} without labels", code(node))
        if (early := next(_returns_in_training([node], labels), None)) is not None:
            raise Missed("no return in training above the loss", early)
    below = _module(*body[end + 1 :])
    terms = LossTerms(forward, below.body, loss, labels, owner, anatomy)
    for node in body[end + 1 :]:
        if not _only_forwards_logits(node, logits, below, terms.is_result):
            raise Missed(f"no use of `{logits}` below the loss but in the result", code(node))
    if terms.lost is not None:
        raise Missed(f"`{loss}` in the result, as what was computed and what is added", terms.lost)
    if late := call.bound & set(loaded(below)):
        raise Missed(f"no use of {', '.join(sorted(late))} below the loss", code(body[end]))
    if call.function == LIBRARY_LOSS:
        call = replace(call, form=library_form(owner, anatomy) * (not _reads(anatomy, body[:end], labels)))
    made = (first, from_parameter, besides, inside, outside, code(projected), module, source)
    return LossRegion(end, call, *made, terms.local)


def _find_loss(editor: Editor, forward: FunctionNode, owner: str, anatomy: Anatomy) -> tuple[int, LossCall]:
    """The position of the `if` that computes the loss where there are labels, and the call."""
    body, local = forward.body, local_names(forward)
    for place, node in enumerate(body):
        if not isinstance(node, ast.If):
            continue
        made = next(filter(None, map(_assigned_call, node.body)), None)
        if made is not None:
            logits, labels, rest = _loss_arguments(editor, made[1], forward)
            further = [one for one in node.body[1:] if _is_switched(one, owner, anatomy)]
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
        case ast.Assign([ast.Name(name), *_], value) if is_loss_call(value):
            return name, value
    return None


def _is_switched(node: ast.stmt, owner: str, anatomy: Anatomy) -> TypeGuard[ast.If]:
    """Whether it is `if self.coefficient > 0:` on a number of the config, below the loss: what it adds may read all logits."""
    match node:
        case ast.If(ast.Compare(left, [ast.Gt()], [ast.Constant(0)]), _, []):
            return is_number(left, owner, anatomy) and not _has_return(node)
    return False


def _own_call(own: OwnLoss, above: Sequence[ast.stmt], forward: FunctionNode, anatomy: Anatomy) -> LossCall:
    """The seam's call for a cross entropy that the head writes out."""
    bound, kwargs = _bound(forward) - own.bound - {own.loss}, kwargs_of(forward)
    for name in filter(None, (own.labels, own.mask)):
        if name in bound or name not in parameter_names(forward):
            raise Missed(f"`{name}` as the caller handed them in, who shifts and counts them", above[-1])
    rest = [f"vocab_size={own.vocab_size}"]
    rest += [f"attention_mask={own.mask}"] if own.mask else []
    rest += ["upcast=True"] if own.upcast else []
    form = own.form
    if form == ALIGNED and _reads(anatomy, above, own.labels):
        form = ""
        rest.append(f"shift_labels={own.labels}")  # the decoder's inputs are made from them, so they are its targets
    elif kwargs:
        rest.append(f"**ops.step_labels({kwargs})")
    return LossCall(f"ops.{own.form}_cross_entropy", form, own.loss, own.logits, own.labels, rest, own.bound)


def _reads(anatomy: Anatomy, body: Sequence[ast.stmt], name: str) -> bool:
    """Whether statements read the value of a name, rather than only its shape or whether it is None."""
    return name in values_in(anatomy.names, *body)


def _made_elsewhere(value: ast.expr, above: Sequence[ast.stmt]) -> tuple[str, ast.expr] | None:
    """The head's function and its argument for logits in the result of an inner model: `outputs[0]`, `outputs.logits`."""
    match value:
        case ast.Subscript(ast.Name(name), ast.Constant(0)) | ast.Attribute(ast.Name(name), "logits"):
            match [node for node in above if stored_names(node, {name})]:
                case [ast.Assign(_, ast.Call(function))] if own_attribute(function):
                    return "ops.given_logits", value
    return None


def _returns_in_training(body: Sequence[ast.stmt], labels: str) -> Iterator[ast.Return]:
    """The returns of these statements that a training step with labels may reach."""
    for node in body:
        if isinstance(node, ast.Return):
            yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("not self.training", f"{labels} is None"):
            yield from _returns_in_training(node.orelse, labels)
        elif not isinstance(node, FunctionNode | ast.ClassDef):
            for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _returns_in_training(getattr(node, name, []), labels)


def check_own_losses(owner: str, anatomy: Anatomy) -> None:
    """Raises Missed if a class or an ancestor replaces transformers' loss, or if its forward is wrapped or has a hook."""
    require_plain_calls(owner, "a head", anatomy)
    require_plain_weights(owner, "a head", anatomy)
    for info in anatomy.lineage(owner):
        members = [ast.Attribute(ast.Name(info.name), member) for member in ("forward", *OWN_LOSSES)]
        around = [*info.node.decorator_list, *getattr(info.methods.get("forward"), "decorator_list", ())]
        for node in (*members, *around):
            meaning = anatomy.names.resolve(node.func if isinstance(node, ast.Call) else node) or ""
            is_library = meaning.startswith(LIBRARIES) and not meaning.startswith(MODELS)
            if not (meaning if node in members else is_library):
                raise Missed("a forward that nothing is put around but what transformers has for that", node)
        for node in walk(info.node):
            name = getattr(node, "name", None) or own_attribute(node) or getattr(node, "id", "")
            if name in OWN_LOSSES and not isinstance(getattr(node, "ctx", None), ast.Load):
                closest = f"{info.name}, line {getattr(node, 'lineno', 0)}: {ast.unparse(node)}"
                raise Missed("the loss that transformers has for the class", closest)


def check_own_readers(forward: ast.stmt, given: set[str], owner: str, anatomy: Anatomy) -> None:
    """Raises Missed if a function or method that `forward` calls changes in place what callers gave for the loss: `given`."""
    for call in calls(forward):
        if (function := anatomy.called(owner, call)) is not None:
            names = parameter_names(function)
            changed, handed = stored_names(_module(*function.body), names), arguments(call, names).items()
            if any(isinstance(arg, ast.Name) and arg.id in given and name in changed for name, arg in handed):
                raise Missed(f"{', '.join(sorted(given))} as the caller handed them in", call)


def _loss_arguments(editor: Editor, call: ast.Call, forward: FunctionNode) -> tuple[str, str, list[str]]:
    """The logits, the labels, and the remaining arguments as source, each under the name of its parameter."""
    kwargs, whole = kwargs_of(forward), editor.code(call)
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
    if not named.get("logits", "-").isidentifier() or not named.get("labels", "-").isidentifier():
        raise Missed("self.loss_function(logits, labels, ...) with plain names", whole)
    logits, labels = named.pop("logits"), named.pop("labels")
    if named.get("vocab_size") in (f"{logits}.shape[-1]", f"{logits}.size(-1)"):
        named["vocab_size"] = "None"
    if named.get("ignore_index", "-100") != "-100":
        raise Missed("the ignore_index -100, which labels are padded with and counted by", whole)
    bound = _bound(forward)
    if labels in bound or labels not in parameter_names(forward):
        raise Missed(f"`{labels}` as the caller handed them in, who shifts and counts them", whole)
    for name, source in named.items():
        read: set[str] = set(loaded(ast.parse(source))) & {logits, labels, *bound} if source != labels else set()
        handed_in = rf'None|{name}|{kwargs}\.(get|pop)\("{name}"(, None)?\)'
        is_own = name in SEAM_PARAMETERS or (name == "num_items_in_batch" and not re.fullmatch(handed_in, source))
        if is_own or read & ({logits, labels} if name == "vocab_size" else read):
            raise Missed(f"an argument {name} that is known without labels, and above the logits", whole)
    if kwargs and not rest and not named.keys() & {"num_items_in_batch", "shift_labels"}:
        rest = [f"**ops.step_labels({kwargs})"]  # upstream passes nothing of a step: packed rows would leak
    return logits, labels, [*(f"{name}={source}" for name, source in named.items()), *rest]


def kwargs_of(forward: FunctionNode) -> str:
    """The name of a forward's `**kwargs`, which go on to the loss; empty without any. Raises Missed if the forward changes what
    the loss reads of them."""
    kwargs = forward.args.kwarg.arg if forward.args.kwarg else ""
    for node in (node for part in forward.body for node in walk(part)):
        is_changed = isinstance(node, ast.stmt) and not is_compound(node) and bool(stored_names(node, {kwargs}))
        if is_changed or (isinstance(node, ast.Call) and dotted(node.func) == f"{kwargs}.pop"):
            words = [getattr(part, name, None) for part in walk(node) for name in ("value", "arg")]
            keys = {word for word in words if isinstance(word, str)}
            if not keys or keys & set(LOSS_PARAMETERS) or kwargs in stored(node):
                raise Missed(f"{kwargs} handed on to the loss as the caller gave them", node)
    return kwargs


def _bound(forward: FunctionNode) -> set[str]:
    """The names that a forward rebinds or changes in place; `x = x.to(...)` does not count."""
    bound: set[str] = set()
    for node in (node for part in forward.body for node in walk(part) if isinstance(node, ast.stmt)):
        match node:
            case ast.Assign([target, *_], ast.Call(function)) if dotted(function) == f"{ast.unparse(target)}.to":
                continue
        inside = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
        parts = inside if is_compound(node) else [node]
        bound |= {name for part in parts for name in stored_names(part, local_names(forward))}
    return bound


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


def _only_forwards_logits(node: ast.AST, logits: str, below: ast.Module, is_result: Callable[[ast.AST], bool]) -> bool:
    """Whether all that a statement below the loss does with the logits is to pass them on in the result: as an argument of the
    output class or an element of a tuple, returned at once or by a name that only return statements read."""
    sums = [(n, n.value.right) for n in walk(below) if isinstance(n, ast.Assign) and isinstance(n.value, ast.BinOp)]
    longer = [n for n, last in sums if ast.unparse(n.targets[0]) == ast.unparse(last)]  # `output = (x,) + output`
    returned = [*longer, *(n for n in walk(below) if isinstance(n, ast.Return))]
    read_else = Counter(loaded(below)) - Counter(name for statement in returned for name in loaded(statement))
    parts: list[ast.expr] = []
    for statement in walk(node):
        match statement:
            case ast.Return(value):
                parts += _parts(value, is_result)
            case ast.Assign([ast.Name(name)], value) if name not in read_else:
                parts += _parts(value, is_result)
    handed = [part for part in parts if isinstance(part, ast.Name) and part.id == logits]
    return len(handed) == sum(isinstance(n, ast.Name) and n.id == logits for n in walk(node))


def _parts(value: ast.expr | None, is_result: Callable[[ast.AST], bool]) -> Sequence[ast.expr]:
    """The values in a result: `Output(logits=logits)`, `(loss, logits) + outputs[1:]`."""
    match value:
        case ast.IfExp(_, left, right) | ast.BinOp(left, ast.Add(), right):
            return [*_parts(left, is_result), *_parts(right, is_result)]
        case ast.Tuple(parts):
            return parts
        case ast.Call(_, given, named) if is_result(value):
            return [*given, *(keyword.value for keyword in named)]
    return ()


def _has_return(node: ast.stmt) -> bool:
    return any(isinstance(child, ast.Return) for child in walk(node))


def _module(*nodes: ast.stmt) -> ast.Module:
    return ast.Module(list(nodes), [])


def check_moves(editor: Editor, forward: FunctionNode, region: LossRegion, owner: str, anatomy: Anatomy) -> None:
    """Raises Missed if the seam would change a value, as it moves statements above the head, or into a function that runs
    per chunk."""
    closure = _module(region.first, *region.inside)
    shown = "\n".join(map(editor.code, closure.body))
    local = local_names(forward)
    read, written = set(loaded(closure)), stored_names(closure, local) - {region.call.logits}
    for node in region.outside:
        if _has_return(node):
            raise Missed("no return between the head and the loss", editor.code(node))
        changed = stored_names(node, read | {region.call.loss})
        if changed:
            names = ", ".join(sorted(changed))
            raise Missed(f"no new value of {names} between the head and the loss", editor.code(node))
        late = set(loaded(node)) & written
        if late:
            raise Missed(f"no use of {', '.join(sorted(late))} but to make the logits", editor.code(node))
    for node in region.inside:
        if _has_return(node) or stored_names(node, {region.call.loss}):
            what = "statements that make the logits, and nothing else, between the head and the loss"
            raise Missed(what, editor.code(node))
    others = _module(*(node for node in forward.body if node not in closure.body))
    given = {arg.arg for arg in walk(forward.args) if isinstance(arg, ast.arg)}
    outer = set(loaded(others)) | stored_names(others, local) | given
    shared = written & (outer | {"self", region.parameter})
    if shared:
        found = "\n".join(map(editor.code, region.inside))
        raise Missed(f"logits made without a new value of {', '.join(sorted(shared))}", found)
    is_name = region.hidden_states == region.parameter
    foreign = region.besides | set(loaded(*region.inside))
    foreign -= {region.call.logits, "self"} | written | (_configs(others) - given)
    foreign &= outer - {region.parameter} if is_name else outer | {region.parameter}
    if foreign:
        what = f"logits made from {region.hidden_states} and the module alone, not from {', '.join(sorted(foreign))}"
        raise Missed(what, shown)
    body = ast.parse("\n".join([region.from_parameter, *map(editor.code, region.inside)])).body
    mixed = mixing(body, {region.parameter: "*.", region.call.logits: "*."}, owner, anatomy)
    if mixed is not None:
        raise Missed("a head that treats every token by itself, for the loss runs over chunks of tokens", mixed)


def _configs(code: ast.Module) -> set[str]:
    """The names that are assigned once, to the config or a part of it."""
    parts = [n for n in code.body if isinstance(n, ast.Assign) and CONFIG.fullmatch(ast.unparse(n.value))]
    bound = stored(code)
    return {name for node in parts for name in stored(node) if bound.count(name) == 1}
