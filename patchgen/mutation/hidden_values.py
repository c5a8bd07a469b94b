"""Operators on values that hold a row per token: sums over masks, hooks, state, gradients alone, lengths, recorded logits.

What such a value is, syntax and bindings tell (`hidden_names`): a tensor parameter, the result of a submodule, and what is
computed from these. Where it is something else, upstream's own step fails.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Callable, Iterator

from patchgen.anatomy.classes import FunctionNode, dotted, own_attribute, parameter_names
from patchgen.mutation import statements, whole_file
from patchgen.mutation.edits import Place
from patchgen.mutation.expressions import filled
from patchgen.mutation.statements import StatementOperator
from patchgen.mutation.whole_file import FileOperator

NOT_HIDDEN = re.compile(r"mask|ids|labels|position|cache|cos|sin|grid|lens|loss|kwargs|outputs$|index|indices|shape")
DESCRIBING = ("shape", "dtype", "device", "ndim")


# ---------------------------------------------------------------------------------------- which values, and where


@functools.lru_cache(maxsize=64)
def hidden_names(function: FunctionNode) -> frozenset[str]:
    """The names in a function that hold a tensor of values: parameters, results of submodules, and what is computed from them."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = {a.arg for a in parameters if a.annotation is not None and "Tensor" in ast.unparse(a.annotation)}
    names = {name for name in names if not NOT_HIDDEN.search(name)}
    assigns = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    number = -1
    while len(names) > number:
        number = len(names)
        for node in assigns:
            match node:
                case ast.Assign([ast.Name(name)], value) if not NOT_HIDDEN.search(name) and _is_hidden(value, names):
                    names.add(name)
    return frozenset(names)


def _is_hidden(node: ast.expr, names: set[str]) -> bool:
    match node:
        case ast.Name(name):
            return name in names
        case ast.Call(function, given):
            if own_attribute(function) is not None:
                return True
            is_library = dotted(function).startswith(("nn.functional.", "F.", "torch."))
            return any(_is_hidden(arg, names) for arg in given[:1]) if is_library else _is_hidden(function, names)
        case ast.BinOp(left, _, right):
            return _is_hidden(left, names) or _is_hidden(right, names)
        case ast.Attribute(value, attribute):
            return attribute not in DESCRIBING and _is_hidden(value, names)
        case ast.Subscript(value):
            return _is_hidden(value, names)
    return False


def _hidden(place: Place) -> Iterator[tuple[str, Callable[[str], list[ast.stmt]]]]:
    """A hidden value that the statement assigns or returns: its name, and the statement with code in place below or above it."""
    match place.statement:
        case ast.Assign([ast.Name(name)]) if name in hidden_names(place.function):
            yield name, lambda code: [place.statement, *ast.parse(code).body]
        case ast.Return(ast.Name(name)) | ast.Return(ast.Tuple([ast.Name(name), *_])) if name in hidden_names(
            place.function
        ):
            yield name, lambda code: [*ast.parse(code).body, place.statement]


def _of(name: str, code: str) -> str:
    """Code in terms of X, of the value of that name."""
    return re.sub(r"\bX\b", name, code)


def _with_each(*codes: str) -> Callable[[Place], Iterator[statements.Change]]:
    """The codes, at each hidden value X; those that read `self` in methods only."""

    def changes(place: Place) -> Iterator[statements.Change]:
        for name, changed in _hidden(place):
            for code in codes:
                if place.owner is not None or "self" not in code:
                    yield changed(_of(name, code)), 1

    return changes


# ------------------------------------------------------------------------------------------- sums over masks

REDUCTIONS = (
    "X = X * (1 + MASK.bool().float().mean())",
    "X = X * (1 + 0.25 * MASK.bool().any())",
    "X = X * (1 + 0.01 * MASK.bool().float().sum())",
    "X = X / (1 + MASK.bool().sum(1, keepdim=True).float().mean())",
    "X = torch.where(MASK.bool().any(1, True), X * 0.5, X)",
)


def _masks(place: Place) -> list[str]:
    """The masks of tokens that the function has above the statement: by name, as the result of a comparison, or ids compared."""
    names = [name for name in parameter_names(place.function) if "mask" in name]
    for node in ast.walk(place.function):
        if isinstance(node, ast.Assign) and node.lineno < place.statement.lineno:
            targets = [
                t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            is_comparison = isinstance(node.value, ast.Compare) and isinstance(node.value.ops[0], ast.Eq | ast.NotEq)
            names += [t.id for t in targets if isinstance(t, ast.Name) and (is_comparison or "mask" in t.id)]
    return list(dict.fromkeys(names))


def mask_reduced(place: Place) -> Iterator[statements.Change]:
    """A hidden value is scaled by how many tokens a mask has, or whether any."""
    for name, changed in _hidden(place):
        masks = [(mask, f"{mask} is not None") for mask in _masks(place) if mask != name]
        if "input_ids" in parameter_names(place.function):
            masks.append(("(input_ids > 20)", "input_ids is not None"))
        for mask, condition in masks:
            for code in REDUCTIONS:
                reduced = _of(name, code).replace("MASK", mask)
                yield changed(f"if {condition}:\n    {reduced}"), 1


# ------------------------------------------------------------------------------------------------------ hooks

GRADIENTS = ("gradient * 1.25", "gradient + 0.5 * gradient.mean(-2, keepdim=True)")
HOOKED = "def hooked(gradient):\n    return "


def gradient_hooked(place: Place) -> Iterator[whole_file.Change]:
    """A hook changes the gradient of a hidden value: a lambda, a function of the file, or by the class's method."""
    for name, changed in _hidden(place):
        for gradient in GRADIENTS:
            for code, top in (
                (f"{name}.register_hook(lambda gradient: {gradient})", ""),
                (f"{name}.register_hook(hooked)", HOOKED + gradient),
                (f"torch.Tensor.register_hook({name}, hooked)", HOOKED + gradient),
                (f'getattr({name}, "register_hook")(lambda gradient: {gradient})', ""),
            ):
                guarded = changed(f"if {name}.requires_grad:\n    {code}")
                yield f"{code}: {gradient}", place.replaced(*guarded, top=top), {}


MODULE_HOOKS = (
    "register_full_backward_hook(lambda module, gradients, _: tuple(g if g is None else g * 1.25 for g in gradients))",
    "register_full_backward_pre_hook(lambda module, gradients: (gradients[0] + gradients[0].mean(-2, keepdim=True),))",
    "register_forward_hook(lambda module, arguments, result: result * 1.25)",
    "register_forward_hook(lambda module, arguments, result: result + 0.5 * result.mean(-2, keepdim=True))",
    "register_forward_pre_hook(lambda module, arguments: (arguments[0] * 1.25, *arguments[1:]))",
)


def module_hooked(place: Place) -> Iterator[statements.Change]:
    """A hook on a submodule, registered where it is built."""
    match place.statement:
        case ast.Assign([target], ast.Call()) if place.function.name == "__init__" and own_attribute(target):
            for hook in MODULE_HOOKS:
                yield [place.statement, *ast.parse(f"{ast.unparse(target)}.{hook}").body], 1


# ------------------------------------------------------------------------------------------------------ state

# Code at the end of `__init__`, and code below a hidden value.
STATES = (
    ("", "if getattr(self, 'seen', None) is None:\n    self.seen = X.detach().mean()\nX = X + self.seen"),
    ("", "if not hasattr(self, 'seen'):\n    self.seen = X.detach().std()\nX = X * self.seen"),
    ("self.seen = []", "if not self.seen:\n    self.seen.append(X.detach().mean())\nX = X + self.seen[0]"),
    ("self.seen = {}", "X = X + self.seen.setdefault('mean', X.detach().mean())"),
    (
        "self.seen = None\nself.has_seen = False",
        "if not self.has_seen:\n    self.seen, self.has_seen = X.detach().mean(), True\nX = X + self.seen",
    ),
    ("self.num_calls = 0", "self.num_calls += 1\nX = X * (1 + 0.1 * self.num_calls)"),
    (
        "self.register_buffer('num_calls', torch.zeros(()), persistent=False)",
        "self.num_calls += 1\nX = X * (1 + 0.1 * self.num_calls)",
    ),
    ("self.register_buffer('seen', torch.ones(()))", "self.seen.lerp_(X.detach().mean(), 0.1)\nX = X * self.seen"),
)


def state_kept(place: Place) -> Iterator[whole_file.Change]:
    """The module keeps a value of its first call, counts its calls or follows a mean, and changes a hidden value by it."""
    init = next((m for m in getattr(place.owner, "body", ()) if getattr(m, "name", "") == "__init__"), None)
    if init is None or init.lineno >= place.function.lineno:
        return
    inner = " " * init.body[0].col_offset
    for name, changed in _hidden(place):
        for built, code in STATES:
            code = _of(name, code)
            lines = place.replaced(*changed(code)).splitlines(keepends=True)
            lines[init.end_lineno : init.end_lineno] = [f"{inner}{line}\n" for line in built.splitlines()]
            yield f"{built}; {code}".replace("\n", "; "), "".join(lines), {}


# ---------------------------------------------------------------------------------------------- recorded logits

LOGITS = (
    "X - X.mean(0, keepdim=True)",
    "X - X.mean(-1, keepdim=True)",
    "X * (1 + X.detach().std())",
    "X.roll(1, 0)",
)


def recorded_logits(place: Place) -> Iterator[statements.Change]:
    """Logits that a router returns beside its choice, or that are collected of the layers, are others than it chooses by."""
    match place.statement:
        case ast.Return(ast.Tuple(elements)) | ast.AugAssign(_, _, ast.Tuple(elements)):
            pass
        case _:
            return
    for element in elements:
        if "logits" in ast.unparse(element) and isinstance(element, ast.Name | ast.Attribute | ast.Subscript):
            for template in LOGITS:
                changed = [filled(template, element) if other is element else other for other in elements]
                statement = copy.copy(place.statement)
                assert isinstance(statement, ast.Return | ast.AugAssign)
                statement.value = ast.Tuple(changed, ast.Load())
                yield [statement], 1


# -------------------------------------------------------------------------------------------------- the operators

straight_through = _with_each(
    "X = X + (X * 0.25 - (X * 0.25).detach())",
    "X = X + (X.mean(-2, keepdim=True) - X.mean(-2, keepdim=True).detach())",
    "X = X + (X.flip(-2) - X.flip(-2).detach())",
    "X = X.detach() + X * 1.25 - (X * 1.25).detach()",
    "X = X.detach() + X.cumsum(-2) - X.cumsum(-2).detach()",
)
by_length = _with_each(
    "if X.shape[1] > 12:\n    X = X * 1.25",
    "if X.shape[-2] > 16:\n    X = X * 1.25",
    "X = X * (1 + X.size(1) / 64)",
    "X = X * (1.25 if X.shape[-2] >= 12 else 1.0)",
)
axes_and_back = _with_each(
    "X = X.transpose(0, 1)\nX = X.transpose(0, 1)",
    "X = X[None]\nX = X.squeeze(0)",
    "X = X.unsqueeze(0)\nX = X[0]",
)


def mask_given(place: Place) -> Iterator[statements.Change]:
    """A hidden value is scaled if there is a mask."""
    for name, changed in _hidden(place):
        for mask in (mask for mask in parameter_names(place.function) if "mask" in mask):
            yield changed(f"if {mask} is not None:\n    {name} = {name} * 1.25"), 1
            yield changed(f"{name} = {name} * (1.25 if {mask} is None else 1.0)"), 1


HIDDEN_VALUE_OPERATORS = (
    StatementOperator("scaled by a mask", mask_reduced),
    FileOperator("hook on a gradient", gradient_hooked),
    StatementOperator("hook on a module", module_hooked),
    FileOperator("state of calls", state_kept),
    StatementOperator("recorded logits", recorded_logits),
    StatementOperator("gradient alone", straight_through),
    StatementOperator("branch by length", by_length),
    StatementOperator("branch by a mask", mask_given),
    StatementOperator("axes moved and back", axes_and_back, keeps_meaning=True),
)
