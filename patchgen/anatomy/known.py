"""Tables of torch's operations and modules, and which attributes are numbers from the config."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterator

from patchgen.anatomy.classes import arguments, assigned_to, calls, defaults_of, own_attribute, walk
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
NUMBERS = tuple(f"builtins.{name}" for name in ("float", "int", "getattr", "min", "max", "len"))
MAKERS = frozenset(f"torch.{name}" for name in ("empty", "zeros", "ones", "rand", "randn"))
TABLES = ("transformers.activations.ACT2FN", "transformers.activations.ACT2CLS")


def is_number(anatomy: Anatomy, owner: str, attribute: str) -> bool:
    """Whether `self.<attribute>` is no tensor: a constant, a value of the config (also a string, a list, or the config itself),
    or computed from these."""
    held = anatomy.held(owner, attribute)
    return bool(held) and all(is_made_of_numbers(value, anatomy, owner) for value in held)


def is_made_of_numbers(value: ast.AST, anatomy: Anatomy, owner: str, visited: frozenset[str] = frozenset()) -> bool:
    """Whether an expression is a constant or a value of a config, or computed from these; in the class that reads it, attributes
    that hold such."""
    if isinstance(value, ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.IfExp):
        parts = (part for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))
        return all(
            isinstance(part, ast.Compare) or is_made_of_numbers(part, anatomy, owner, visited) for part in parts
        )
    if isinstance(value, ast.Call):
        parts, meaning = value.args, anatomy.names.resolve(value.func)
        match parts:
            case [holder, ast.Constant(str(name)), *defaults] if meaning == "builtins.getattr":
                parts = [ast.Attribute(holder, name, ast.Load()), *defaults]
        return meaning in NUMBERS and all(is_made_of_numbers(part, anatomy, owner, visited) for part in parts)
    if isinstance(value, ast.Subscript):
        return is_made_of_numbers(value.value, anatomy, owner, visited)
    if isinstance(value, ast.Name) and value.id != CONFIG:
        return value.id not in visited and _is_number_by_name(value, anatomy, owner, visited | {value.id})
    place = anatomy.constructions.scopes.get(value.value) if isinstance(value, ast.Attribute) else None
    if place and (attribute := own_attribute(value)):
        held, read = anatomy.held(place.owner, attribute), f"{place.owner}.{attribute}"
        if held and read not in visited:
            return all(is_made_of_numbers(one, anatomy, place.owner, visited | {read}) for one in held)
    return isinstance(value, ast.Constant) or is_left_in_config(anatomy, value)


def _is_number_by_name(name: ast.Name, anatomy: Anatomy, owner: str, visited: frozenset[str]) -> bool:
    """The same for a local variable, or a parameter of `__init__`: by what it is handed; where that is nothing, by its annotation
    or default."""
    place, init = anatomy.constructions.scopes.get(name), anatomy.method(owner, "__init__")
    function = place.function if place else init and init[1]
    if function is None or (known := assigned_to(function, name.id)) is None:
        return False
    annotations = {arg.arg: arg.annotation for arg in walk(function.args) if isinstance(arg, ast.arg)}
    annotation = annotations.get(name.id)
    is_annotated = annotation is not None and ast.unparse(annotation) in ("float", "int", "bool")
    if name.id in annotations and function.name == "__init__":
        default = defaults_of(function).get(name.id)
        known = [*anatomy.handed(owner, name)] or ([default] if default is not None and not is_annotated else [])
    elif name.id in annotations and not is_annotated:
        known = []  # what other methods are called with is not read
    return bool(known or is_annotated) and all(is_made_of_numbers(value, anatomy, owner, visited) for value in known)


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
