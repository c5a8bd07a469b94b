"""Loops over the tokens or chunks of data that carry a value from one step to the next."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from patchgen.anatomy.classes import (
    FunctionNode,
    all_arguments,
    base_name,
    calls,
    dotted,
    is_in_place,
    own_attribute,
    parameters,
    stored,
    targets,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.anatomy.state_changes import SHARING, value_pairs

AS_LONG_AS_FIRST = ("builtins.enumerate", "builtins.reversed", "builtins.iter", "builtins.list", "builtins.tuple")
SHORTEST = "builtins.zip"
RANGE = "builtins.range"
ADDING = ("append", "extend", "insert")  # to a list
REPLACING = ("copy_", "zero_", "fill_")  # these leave nothing of the tensor's old values
SUMMING = ("index_add_", "scatter_add_")  # into rows, where steps add in any order: what experts give
VIEWS = (*SHARING, "reshape", "flatten", "transpose", "permute", "select", "narrow")  # may share memory


def carrying_loop(anatomy: Anatomy, function: FunctionNode) -> ast.For | ast.While | None:
    """The first loop whose number of steps depends on data and that carries values computed from data; None without one.

    All parameters count as data except `self` and `config`, which provide numbers and modules.
    """
    data = made_of(anatomy, function, parameters(function) - {"config"}, names_read)
    shared = _shared(function)
    for loop in walk(function):
        match loop:
            case ast.For(target, iterable, body) if _counts_data(anatomy, function, iterable, data):
                if {dotted(call.func) for call in calls(*body)} & set(stored(target)):
                    continue  # its elements are modules or functions
                own, steps = _names(ast.Store, target), _steps(anatomy, target, iterable, _names(ast.Store, *body))
            case ast.While(test, body) if data & _names(ast.Load, test) or isinstance(test, ast.Constant):
                own, steps = set[str](), dict[str, str]()
            case _:
                continue
        bound, before = _names(ast.Store, *body) - own, _read_before_stored(body)
        changed = _changed_and_read(anatomy, body, steps, shared)
        carried = {name for name in changed if not shared.get(name, {name}) <= (bound - before) | own}
        if ((bound & before) | carried) & data:
            return loop
    return None


def _name(node: ast.AST) -> str:
    """`h` and `self.h`; "" for other code."""
    if isinstance(node, ast.Name):
        return node.id if node.id != "self" else ""
    attribute = own_attribute(node)
    return f"self.{attribute}" if attribute else ""


def _names(context: type[ast.expr_context], *code: ast.AST, without: Container[ast.AST] = ()) -> set[str]:
    """The names, and attributes of `self`, that code reads or binds."""
    nodes = (node for part in code for node in walk(part) if node not in without)
    return {_name(node) for node in nodes if isinstance(getattr(node, "ctx", None), context)} - {""}


def values_used(*code: ast.AST) -> set[str]:
    """The names, and attributes of `self`, whose values or sizes code uses, rather than only their device, their dtype or
    whether they are None."""
    not_read: list[ast.expr] = []
    for node in (node for part in code for node in walk(part)):
        match node:
            case ast.Attribute(value, "device" | "dtype") | ast.Compare(value, [ast.Is() | ast.IsNot()]):
                not_read.append(value)
    return _names(ast.Load, *code, without=not_read)


def names_read(*code: ast.AST) -> set[str]:
    """The names, and attributes of `self`, that code reads."""
    return _names(ast.Load, *code)


def made_of(
    anatomy: Anatomy, function: FunctionNode, sources: set[str], reads: Callable[..., set[str]] = values_used
) -> set[str]:
    """`sources`, and the names and attributes of `self` that a function computes from them, also those that it writes to in
    part or in place; `reads`: the names that code computes from."""
    made, before = {*sources}, -1
    while before < len(made):
        before = len(made)
        for node in walk(function):
            pairs = [(node.target, node.iter)] if isinstance(node, ast.comprehension) else value_pairs(node)
            for target, value in pairs:
                written = _names(ast.Store, target) | {base_name(target)} - {"", "self"}
                made |= written if made & reads(value) else set()
            for part, values, _ in changes(anatomy, node):
                made |= {_part(part)[1]} - {""} if made & reads(*values) else set()
    return made


def _shared(function: FunctionNode) -> dict[str, set[str]]:
    """Name -> all names of the same object, of `out = h` and `out = h = torch.zeros(...)`."""
    shared = dict[str, set[str]]()
    for node in walk(function):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            continue
        parts = [{_name(target), _name(value)} for target, value in value_pairs(node) if value is not node.value]
        for names in (*parts, {_name(part) for part in (*targets(node), node.value) if part is not None}):
            group = {same for name in names - {""} for same in shared.get(name, {name})}
            shared |= dict.fromkeys(group, group)
    return shared


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
                return bool(data & _names(ast.Load, *args))
    return bool(data & _names(ast.Load, iterable))


def _steps(anatomy: Anatomy, target: ast.expr, iterable: ast.expr, bound: Container[str]) -> dict[str, str]:
    """The loop's names for numbers that each step alone has -> how far they are apart; of names that the body does not bind."""
    if not isinstance(iterable, ast.Call) or not iterable.args:
        return {}
    meaning, pairs, steps = anatomy.names.resolve(iterable.func), [(target, iterable.args[0])], dict[str, str]()
    match target:
        case ast.Name(name) if meaning == RANGE and name not in bound:
            between = iterable.args[2] if len(iterable.args) > 2 else ast.Constant(1)
            is_changed = any(part in bound for part in _names(ast.Load, between))
            return {name: "" if is_changed else ast.unparse(between)}
        case ast.Tuple([ast.Name(name), element]) if meaning == "builtins.enumerate":
            steps, pairs = {name: "1"} if name not in bound else {}, [(element, iterable.args[0])]
        case ast.Tuple(parts) if meaning == SHORTEST:
            pairs = list(zip(parts, iterable.args, strict=False))
        case _ if meaning not in AS_LONG_AS_FIRST or meaning == "builtins.enumerate":
            return {}
    return steps | {name: step for pair in pairs for name, step in _steps(anatomy, *pair, bound).items()}


def _is_own(index: ast.expr | None, steps: Mapping[str, str]) -> bool:
    """Whether an index is of a place that no other step has: `i`, or `i : i + size` where steps are `size` apart."""
    for one in getattr(index, "elts", [index]):
        match one:
            case ast.Name(name) if name in steps:
                return True
            case ast.Slice(ast.Name(name), ast.BinOp(ast.Name(start), ast.Add(), size), None) if (
                name == start and steps.get(name) == ast.unparse(size)
            ):
                return True
    return False


def changes(anatomy: Anatomy, node: ast.AST) -> Iterator[tuple[ast.expr, list[ast.expr], bool]]:
    """What code changes in part or in place, of which values, and whether that is made of what an earlier step left."""
    for target, value in value_pairs(node):
        if isinstance(target, ast.Subscript):
            yield target, [value], isinstance(node, ast.AugAssign)
    if isinstance(node, ast.Expr):  # `cache.put(x)`: nothing takes its result, it is run for what it changes
        match node.value:
            case ast.Call(ast.Attribute(holder), args, keywords) if anatomy.names.resolve(holder) is None:
                yield holder, [*args, *(keyword.value for keyword in keywords)], False
    if not isinstance(node, ast.Call):
        return
    values = all_arguments(node)
    match node:
        case ast.Call(ast.Attribute(holder, method) as called, args) if is_in_place(called):
            is_function = anatomy.names.resolve(called) and args  # `torch.relu_(h)`
            yield args[0] if is_function else holder, values, method not in (*REPLACING, *SUMMING)
        case ast.Call(ast.Attribute(holder, method)) if method in ADDING:
            yield holder, values, False
    for keyword in node.keywords:
        if keyword.arg == "out":
            yield from ((part, node.args, False) for part in getattr(keyword.value, "elts", [keyword.value]))


def _part(node: ast.expr) -> tuple[ast.expr, str, ast.expr | None]:
    """Of `h[i][0]` what holds it, its name, and the place in it; no place where a view of it counts otherwise."""
    index: ast.expr | None = None
    while not _name(node):
        match node:
            case ast.Subscript(value, part):
                node, index = value, part
            case ast.Attribute(value, attribute):
                node, index = value, index if attribute == "data" else None
            case ast.Call(ast.Attribute(value) as called) if is_in_place(called):
                node = value
            case ast.Call(ast.Attribute(value, method)) if method in VIEWS:
                node, index = value, None
            case _:
                break
    return node, _name(node), index


def _changed_and_read(
    anatomy: Anatomy, body: Sequence[ast.stmt], steps: Mapping[str, str], shared: Mapping[str, set[str]]
) -> set[str]:
    """The names of what a step changes in part or adds to (`h[0] = ...`, `parts.append(...)`), and reads at another place
    than `out[:, i]`, with a name of `steps`, which each step alone has."""
    nodes = [node for statement in body for node in walk(statement)]
    places, added_to, own_reads = dict[str, set[str]](), set[str](), set[ast.AST]()
    for node in nodes:
        for part, _, is_added in changes(anatomy, node):
            holder, name, index = _part(part)
            own_reads.add(holder)
            for same in shared.get(name, {name} - {""}):
                places.setdefault(same, set()).add(ast.unparse(index) if index and _is_own(index, steps) else "")
                added_to |= {same} if is_added else set()
        match node:
            case ast.Call(function, [part]) if anatomy.names.resolve(function) == "builtins.len":
                own_reads.add(part)  # a number
    for node in nodes:
        match node:
            case ast.Subscript(part, index, ast.Load()) if places.get(_name(part)) == {ast.unparse(index)}:
                own_reads.add(part)
    read = _names(ast.Load, *body, without=own_reads)
    found = {name for name in places if name in read or (name in added_to and "" in places[name])}
    return {same for name in found for same in shared.get(name, {name})}


def _read_before_stored(body: Sequence[ast.stmt]) -> set[str]:
    """The names that a step reads with the value that the step before left."""
    read, written = set[str](), set[str]()
    for statement in body:
        bound = _names(ast.Store, statement)
        match statement:
            case ast.With(items, inside):
                found = _names(ast.Load, *items) | _read_before_stored(inside)
            case ast.If(header, inside, orelse):
                found = _names(ast.Load, header) | _read_before_stored(inside) | _read_before_stored(orelse)
                bound = _names(ast.Store, *inside) & _names(ast.Store, *orelse)
            case ast.For(_, header, inside, orelse) | ast.While(header, inside, orelse):
                found = _names(ast.Load, header) | _read_before_stored(inside) | _read_before_stored(orelse)
                bound = set[str]()
            case _:
                additions = (node.target for node in walk(statement) if isinstance(node, ast.AugAssign))
                found = _names(ast.Load, statement) | _names(ast.Store, *additions)
        read |= found - written
        written |= bound
    return read
