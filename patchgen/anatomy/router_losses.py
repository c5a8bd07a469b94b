"""The load-balancing losses of a file: the functions that compute them, and which of the known forms they have."""

from __future__ import annotations

import ast
import functools
from itertools import takewhile

from patchgen.anatomy.bodies import normal_form
from patchgen.anatomy.classes import FunctionNode, calls, parameter_names
from patchgen.anatomy.graph import Anatomy
from patchgen.errors import Missed
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


def require_known(function: FunctionNode) -> None:
    """Raises Missed unless a function is one of upstream's known forms; only of those ranks can compute shares."""
    form = normal_form(function).text
    if form in known_forms():
        return
    pairs = [zip(form.splitlines(), known.splitlines(), strict=False) for known in known_forms()]
    same = max(sum(1 for _ in takewhile(lambda lines: lines[0] == lines[1], pair)) for pair in pairs)
    source = "\n".join(map(ast.unparse, function.body[ast.get_docstring(function) is not None :])).splitlines()
    closest = "\n".join(source[max(same - 1, 0) :])
    raise Missed("one of the forms in templates/router_losses.jinja", closest)
