"""Loops over the tokens or chunks of data that carry a value from one step to the next."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy.classes import FunctionNode, base_name, calls, dotted, loaded, parameters, stored, walk
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.anatomy.state_changes import value_pairs

AS_LONG_AS_FIRST = ("builtins.enumerate", "builtins.reversed", "builtins.iter", "builtins.list", "builtins.tuple")
SHORTEST = "builtins.zip"
RANGE = "builtins.range"


def carrying_loop(anatomy: Anatomy, function: FunctionNode) -> ast.For | ast.While | None:
    """The first loop whose number of steps depends on data and that carries values computed from data; None without one.

    All parameters count as data except `self` and `config`, which provide numbers and modules.
    """
    data = _made_of_data(function)
    for loop in walk(function):
        match loop:
            case ast.For(target, iterable, body) if _counts_data(anatomy, function, iterable, data):
                if {dotted(call.func) for call in calls(*body)} & set(stored(target)):
                    continue  # its elements are modules or functions
                carried = _read_before_stored(body) & set(stored(*body)) - set(stored(target))
                carried |= _changed_and_read(anatomy, body, {*stored(target)} - {*stored(*body)})
            case ast.While(test, body) if data & set(loaded(test)) or isinstance(test, ast.Constant):
                carried = _read_before_stored(body) & set(stored(*body)) | _changed_and_read(anatomy, body, set())
            case _:
                continue
        if carried & data:
            return loop
    return None


def _made_of_data(function: FunctionNode) -> set[str]:
    """The names of data and of what is computed from it, sizes of tensors included."""
    made, before = parameters(function) - {"config"}, -1
    while before < len(made):
        before = len(made)
        for node in walk(function):
            pairs = [(node.target, node.iter)] if isinstance(node, ast.comprehension) else value_pairs(node)
            made |= {
                name for target, value in pairs if made & set(loaded(value)) for name in _bound_or_changed(target)
            }
            match node:
                case ast.Call(ast.Attribute(ast.Name(name), "append" | "extend"), [added]) if made & set(
                    loaded(added)
                ):
                    made.add(name)
    return made


def _counts_data(anatomy: Anatomy, function: FunctionNode, iterable: ast.expr, data: set[str]) -> bool:
    """Whether the number of elements of an iterable depends on data, as far as the source tells."""
    match iterable:
        case ast.Tuple() | ast.List() | ast.Set() | ast.Dict():
            return False
        case ast.Call(called, [first, *_] as args):
            meaning = anatomy.names.resolve(called, local_names(function))
            if meaning in AS_LONG_AS_FIRST:
                return _counts_data(anatomy, function, first, data)
            if meaning == SHORTEST:
                return all(_counts_data(anatomy, function, part, data) for part in args)
            if meaning == RANGE:
                return bool(data & set(loaded(*args)))
    return bool(data & set(loaded(iterable)))


def _bound_or_changed(target: ast.expr) -> list[str]:
    """The names that an assignment to a target binds or changes in part: `h` for `h` and `h[0]`."""
    part = base_name(target) if isinstance(target, ast.Subscript) else ""
    return [part] if part else stored(target)


def _changed_and_read(anatomy: Anatomy, body: Sequence[ast.stmt], steps: set[str]) -> set[str]:
    """The names that a step changes in part or appends to (`h[0] = ...`, `parts.append(...)`) and that a step reads.

    Reads at the place that the step itself writes do not count, such as `out[:, i]`, where `i` is one of `steps`: the names
    that have another value in each step.
    """
    nodes = [node for statement in body for node in walk(statement)]
    places, shared, own_reads = dict[str, set[str]](), set[str](), set[ast.AST]()
    for node in nodes:
        match node:
            case ast.Subscript(ast.Name(name) as part, index, ast.Store()):
                own_reads.add(part)
                names = [one.id for one in getattr(index, "elts", [index]) if isinstance(one, ast.Name)]
                places.setdefault(name, set()).add(ast.unparse(index) if steps & {*names} else "")
            case ast.Call(ast.Attribute(ast.Name(name) as part, "append" | "extend")):
                own_reads.add(part)
                places.setdefault(name, set()).add("")
            case ast.AugAssign(ast.Subscript(ast.Name(name))):
                shared.add(name)
            case ast.Call(function, [ast.Name() as part]) if anatomy.names.resolve(function) == "builtins.len":
                own_reads.add(part)  # its length is no data
    for node in nodes:
        match node:
            case ast.Subscript(ast.Name(name) as part, index, ast.Load()) if places.get(name) == {ast.unparse(index)}:
                own_reads.add(part)
    read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n not in own_reads}
    return {name for name in places if name in read or (name in shared and "" in places[name])}


def _read_before_stored(body: Sequence[ast.stmt]) -> set[str]:
    """The names that a step reads with the value that the step before left."""
    read: set[str] = set()
    written: set[str] = set()
    for statement in body:
        match statement:
            case ast.With(items, inside):
                read |= ({*loaded(*items)} | _read_before_stored(inside)) - written
                written |= set(stored(statement))
            case ast.If(test, inside, orelse):
                read |= ({*loaded(test)} | _read_before_stored(inside) | _read_before_stored(orelse)) - written
                written |= set(stored(*inside)) & set(stored(*orelse))
            case ast.For(_, header, inside, orelse) | ast.While(header, inside, orelse):
                read |= ({*loaded(header)} | _read_before_stored(inside) | _read_before_stored(orelse)) - written
            case _:
                additions = (node for node in walk(statement) if isinstance(node, ast.AugAssign))
                added_to = [name for node in additions for name in stored(node.target)]
                read |= {*loaded(statement), *added_to} - written
                written |= set(stored(statement))
    return read
