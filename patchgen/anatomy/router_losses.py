"""The load-balancing losses of a file: the functions that compute them, and the arguments of their calls."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator
from itertools import takewhile

from patchgen.anatomy.bodies import normal_form
from patchgen.anatomy.classes import FunctionNode, arguments, calls, is_compound, own_attribute, parameter_names, walk
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.loss_terms import SHARES, is_number
from patchgen.anatomy.names import local_names
from patchgen.anatomy.tokenwise import stored_names
from patchgen.errors import Missed
from patchgen.source import Module
from patchgen.templates import render

MASK = "attention_mask"
LOGITS = "gate_logits"


@functools.cache
def known_forms() -> dict[str, str]:
    """Upstream's forms of the loss: normal form -> source."""
    source = render("router_losses.jinja")
    functions = (node for node in ast.parse(source).body if isinstance(node, FunctionNode))
    return {normal_form(function).text: ast.get_source_segment(source, function) or "" for function in functions}


def router_losses(anatomy: Anatomy) -> dict[str, FunctionNode]:
    """The load-balancing losses of the file: functions whose first parameter is `gate_logits`, the last `attention_mask`."""
    named = {name: parameter_names(node) for name, node in anatomy.functions.items()}
    return {n: anatomy.functions[n] for n, given in named.items() if given[:1] == [LOGITS] and given[-1] == MASK}


def called_losses(code: ast.AST, anatomy: Anatomy) -> set[str]:
    """The load-balancing losses of the file that code calls."""
    meanings = {anatomy.names.resolve(call.func) for call in calls(code)}
    return {name for name in router_losses(anatomy) if f".{name}" in meanings}


def require_known(function: FunctionNode, anatomy: Anatomy) -> None:
    """Raises Missed unless a function is one of upstream's known forms; only of those ranks can compute shares."""
    form = normal_form(function).text
    pairs = [zip(form.splitlines(), known.splitlines(), strict=False) for known in known_forms()]
    same = max(sum(1 for _ in takewhile(lambda lines: lines[0] == lines[1], pair)) for pair in pairs)
    names = [node for node in walk(ast.Module(function.body, [])) if isinstance(node, ast.Name)]
    meant = {anatomy.names.resolve(node, local_names(function)) or node.id for node in names}
    strange = {name for name in meant - local_names(function) if name != "torch" and not name.startswith("builtins.")}
    if form not in known_forms() or strange or function.decorator_list:
        source = "\n".join(map(ast.unparse, function.body[ast.get_docstring(function) is not None :])).splitlines()
        closest = "\n".join(source[max(same - 1, 0) :])
        raise Missed("one of the forms in templates/router_losses.jinja, by that name alone", closest)


def require_given(call: ast.Call, loss: FunctionNode, method: FunctionNode, owner: str, anatomy: Anatomy) -> None:
    """Raises Missed unless a loss is called with a model's router logits, the caller's attention mask, and numbers."""
    given = arguments(call, parameter_names(loss))
    logits, mask = given.pop(LOGITS, None), given.pop(MASK, None)
    match logits:  # `outputs.router_logits if return_dict else outputs[-1]`
        case ast.IfExp(ast.Name("return_dict"), ast.Attribute(ast.Name(a)) as named, ast.Subscript(ast.Name(b))) if (
            a == b
        ):
            logits = named
    simple = [node for node in walk(method) if isinstance(node, ast.stmt) and not is_compound(node)]
    model = getattr(getattr(logits, "value", None), "id", "")
    made = [getattr(node, "value", None) for node in simple if stored_names(node, {model})]
    is_made = len(made) == 1 and isinstance(made[0], ast.Call) and own_attribute(made[0].func)
    is_mask = getattr(mask, "id", "") == MASK and MASK in parameter_names(method)
    is_kept = not any(stored_names(node, {MASK}) for node in simple)
    others = all(is_number(value, owner, anatomy) for value in given.values())
    if not (isinstance(logits, ast.Attribute) and is_made and is_mask and is_kept and others):
        raise Missed("router logits as a model's result holds them, the caller's attention mask, and numbers", call)


def other_uses(module: Module, losses: Collection[str]) -> Iterator[str]:
    """Each use of the losses in a file other than one definition and calls in methods, as a message."""
    for name in losses:
        if sum(name in block.binds for block in module) > 1:
            yield f"{name} is bound more than once"
    for block in module:
        called = [call for call in calls(block.node) if isinstance(block.node, ast.ClassDef)]
        known = {id(next(iter(call.args), None) if ast.unparse(call.func) == SHARES else call.func) for call in called}
        for node in walk(block.node):
            if isinstance(node, ast.Name) and node.id in losses and id(node) not in known:
                yield f"line {block.line} on names {node.id} and does not call it"
