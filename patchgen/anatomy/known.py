"""Tables of torch's operations, and what is known of a class's buffers and attributes."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterator

from patchgen.anatomy.classes import arguments, calls, own_attribute, walk
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import CONFIG, is_of_config

CASTS = frozenset({"float", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone", "detach"})
# fmt: off
POINTWISE = CASTS | {
    "tanh", "sigmoid", "exp", "log", "abs", "sqrt", "rsqrt", "pow", "square", "mul", "div", "add", "sub", "neg", "clamp",
    "clip", "where", "masked_fill", "full_like", "zeros_like", "ones_like", "nan_to_num", "gelu", "relu", "silu",
    "softplus", "layer_norm", "minimum", "maximum",
}
# fmt: on
MAKERS = frozenset(f"torch.{name}" for name in ("empty", "zeros", "ones", "rand", "randn"))
TABLES = ("transformers.activations.ACT2FN", "transformers.activations.ACT2CLS")


def is_left_in_config(anatomy: Anatomy, value: ast.AST) -> bool:
    """Whether a value is read from a config, and no code of the file stores another value there."""
    name = value.attr if isinstance(value, ast.Attribute) else ""
    return is_of_config(value) and not anatomy.is_stored_outside(name, [CONFIG])


def buffers(anatomy: Anatomy, owner: str) -> dict[str, bool]:
    """Attribute -> whether checkpoints keep it, of the buffers that a class and its ancestors make by `nn.Buffer` or
    `register_buffer`."""
    persistent_of: dict[str, bool] = {}
    for name, given in made_buffers(anatomy, owner):
        if name is not None:
            persistent_of.setdefault(name, "persistent" not in given or ast.unparse(given["persistent"]) != "False")
    return persistent_of


def made_buffers(anatomy: Anatomy, owner: str) -> Iterator[tuple[str | None, dict[str | None, ast.expr]]]:
    """Each such buffer: its attribute, None for a computed name, and the arguments of the call."""
    for info in anatomy.lineage(owner):
        for attribute, call in info.built.items():
            if anatomy.is_a(call, "torch.nn.Buffer"):
                yield attribute, arguments(call, ("data",))
        for call in calls(info.node):
            if own_attribute(call.func) == "register_buffer":
                given = arguments(call, ("name", "tensor", "persistent"))
                name = given.get("name")
                yield str(name.value) if isinstance(name, ast.Constant) else None, given


def is_left_by_init(anatomy: Anatomy, owner: str, attribute: str) -> bool:
    """Whether an attribute keeps what an `__init__` gives it."""
    methods = [code for info in anatomy.family(owner) for method, code in info.methods.items() if method != "__init__"]
    changed = {own_attribute(place) for code in methods for node in walk(code) for place in _changed(node)}
    return bool(anatomy.held(owner, attribute)) and attribute not in changed


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """What a node assigns to, in whole or in part, or calls a method of for what it changes."""
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            yield node
        case ast.Subscript(value, ctx=ast.Store() | ast.Del()) | ast.Expr(ast.Call(ast.Attribute(value))):
            yield value
