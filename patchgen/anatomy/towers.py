"""The loop over the layers of a tower: what its layers read, and the code from there to the return.

The rows of a tower are the patches or audio frames of all inputs, concatenated. If its layers attend by lengths
(`cu_seqlens`) a rank can work on a slice of the rows from the loop on, until code needs all rows. Whether anything but
attention mixes rows is not read here: the proof compares slices with the whole.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from patchgen.anatomy.classes import (
    ClassInfo,
    FunctionNode,
    arguments,
    calls,
    dotted,
    loaded,
    own_attribute,
    parameter_names,
    stored,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.roles import Role
from patchgen.anatomy.sizes import SINGLE_SIDES, in_config
from patchgen.errors import LeftAlone

LENGTHS_TEST = "is_flash_attention_requested"
SOUND_CONVOLUTIONS = ("torch.nn.Conv1d", "torch.nn.Conv2d")
# The parameters for lengths, and for tensors of rows, of the layers of transformers' towers.
BOUNDS, LONGEST = {"cu_seqlens"}, {"max_seqlen"}
ROWS = {"position_embeddings", "rotary_pos_emb", "cos", "sin"}
REGROUPS = ("view", "reshape", "permute")  # methods that may merge neighbouring rows, the first axis staying theirs


Gather = tuple[int, tuple[str, ...]]  # before the statement at this index these names must be gathered to all rows


@dataclass(frozen=True)
class LayerLoop:
    """What a pass needs to divide the rows of a tower."""

    place: int  # index of the loop among the statements of forward
    layers: str  # the attribute that holds the layers
    rows: tuple[str, ...]  # tensors with a row per row of the tower; first the hidden states that the layers pass on
    bounds: tuple[str, ...]  # names of cumulative lengths
    longest: tuple[str, ...]  # names of the greatest length
    group: str  # how many rows must stay on one rank, as source (`_group`)
    gathers: tuple[Gather, ...]
    attentions: tuple[str, ...]  # the layers' classes whose forward chooses between lengths and one call per input


@dataclass(frozen=True)
class ChunkedConvolution:
    """Chunks of sound `[N, ...]` that a tower convolves, each by itself, before it selects what is no padding."""

    start: int  # index of the first statement that convolves
    end: int  # of the one that selects
    chunks: tuple[str, ...]  # tensors that have a row per chunk before `start`; those that are convolved come last
    result: str  # the name of the convolved chunks before `end`


def layer_loop(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode | None = None) -> LayerLoop:
    """Reads the forward of a tower: upstream's, or `forward`, the one that earlier passes have rewritten. Raises LeftAlone if
    its layers do not attend by lengths, or read what has no known meaning on a slice of rows."""
    forward = forward or info.methods["forward"]
    place, loop, layers = _loop(forward)
    kinds = [build.target or "" for build in anatomy.builds(info.name) if build.attribute == layers]
    attentions = _attentions(anatomy, kinds, layers)
    method = anatomy.method(kinds[0], "forward") if len(kinds) == 1 else None
    takes = parameter_names(method[1]) if method is not None else []
    carried = _carried(loop, takes)
    above = {*stored(*forward.body[:place]), *parameter_names(forward)}
    inside = {*stored(*loop.body, loop.target)}
    rows, bounds, longest, lists = [carried], list[str](), list[str](), _lists(forward.body[:place])
    for name in dict.fromkeys(loaded(loop)):
        if name in (carried, "self", "kwargs") or name not in above:
            continue
        roles = _taken_as(name, loop, takes)
        if roles == BOUNDS:
            bounds.append(name)
        elif roles == LONGEST:
            longest.append(name)
        elif roles and roles <= ROWS:
            rows.append(name)
        elif name not in lists and (name not in inside or _read_first(name, loop)):
            raise LeftAlone(f"its layers read {name}, which has no known meaning on a slice of the rows")
    if not bounds:
        raise LeftAlone("its layers are handed no cumulative lengths")
    group = _group(anatomy, info)
    local = [carried, *(name for name in dict.fromkeys(loaded(loop)) if name in lists and name != carried)]
    gathers = _gathers(anatomy, info, forward.body, place, local, above, group)
    return LayerLoop(place, layers, tuple(rows), tuple(bounds), tuple(longest), group, gathers, tuple(attentions))


def chunked_convolution(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> ChunkedConvolution | None:
    """The convolutions of an audio tower over padded chunks, up to the `index_select` of what is no padding; None if its
    forward has no such code, or that reads other than tensors from above."""
    called = [(place, dotted(call.func), call) for place, s in enumerate(forward.body) for call in calls(s)]
    convolutions = {f"self.{name}" for name, call in info.built.items() if anatomy.is_a(call, *SOUND_CONVOLUTIONS)}
    convolving = [(place, call) for place, name, call in called if name in convolutions]
    assigned = [(place, name, call) for place, name, call in called if isinstance(forward.body[place], ast.Assign)]
    selecting = [(place, call) for place, name, call in assigned if name == "torch.index_select"]
    if not convolving or len(selecting) != 1 or selecting[0][0] <= convolving[0][0]:
        return None
    (start, convolution), (end, select) = convolving[0], selecting[0]
    source = next(iter(loaded(select.args[0])), "")
    above, inside = {*stored(*forward.body[:start])}, {*stored(*forward.body[start:end])}
    lists = _lists(forward.body[:start])
    read = {name for name in loaded(*forward.body[start:end]) if name in above - lists}
    if not read or read & inside or source not in inside:
        return None
    # Assumed: all tensors read from above have a row per chunk; the runtime checks that when it divides the rows.
    made = [s.value for s in forward.body[:start] if isinstance(s, ast.Assign) and read & {*stored(s)}]
    if not all(isinstance(value, ast.Call) for value in made):  # sizes, which are those of all chunks
        return None
    convolved = loaded(convolution)
    return ChunkedConvolution(start, end, tuple(sorted(read, key=lambda name: (name in convolved, name))), source)


def _lists(body: list[ast.stmt]) -> set[str]:
    """The names that statements set to an empty list and do not use otherwise, so that it is still empty below."""
    touched = [*stored(*body), *loaded(*body)]
    assigned = (s for s in body if isinstance(s, ast.Assign | ast.AnnAssign))
    empty = (stored(s) for s in assigned if s.value and ast.unparse(s.value) == "[]")
    names = {name for bound in empty if len(bound) == 1 for name in bound}  # `a = b = []` is one list
    return {name for name in names if touched.count(name) == 1}


def is_divided(anatomy: Anatomy, info: ClassInfo) -> bool:
    """Whether the class is a tower whose rows the passes for towers divide over ranks."""
    if not {Role.VISION, Role.AUDIO} & set(info.roles) or "forward" not in info.methods:
        return False
    try:
        layer_loop(anatomy, info)
    except LeftAlone:
        return False
    return True


def _loop(forward: FunctionNode) -> tuple[int, ast.For, str]:
    """The index of the loop over layers, the loop, and the attribute that it runs over."""
    loops = [(place, node) for place, node in enumerate(forward.body) if isinstance(node, ast.For)]
    layer_loops = [(place, loop, layers) for place, loop in loops if (layers := _layers(loop))]
    if len(layer_loops) != 1:
        raise LeftAlone(f"its forward has {len(layer_loops)} loops over layers at its top level")
    return layer_loops[0]


def _layers(loop: ast.For) -> str | None:
    """The attribute that a loop over modules runs over: `self.blocks`, `enumerate(self.blocks)`, `self.blocks[:n]`."""
    called = {dotted(call.func) for call in calls(*loop.body)}
    over = (attribute for node in walk(loop.iter) if (attribute := own_attribute(node)))
    return next(over, None) if called & set(stored(loop.target)) else None


def _carried(loop: ast.For, takes: Sequence[str]) -> str:
    """The name that the loop passes to the layers first (their parameters are `takes`) and assigns in its body."""
    layer = set(stored(loop.target))
    inside = set(stored(*loop.body))
    for call in (call for call in calls(*loop.body) if dotted(call.func) in layer):
        given = arguments(call, takes[:1]).get(takes[0]) if takes else next(iter(call.args), None)
        if isinstance(given, ast.Name) and given.id in inside:
            return given.id
    raise LeftAlone("its loop carries no hidden states from layer to layer")


def _taken_as(name: str, loop: ast.For, takes: list[str], above: frozenset[str] = frozenset()) -> set[str]:
    """The parameters of the layers (`takes`, in order) that get a name, or an alias of it in the loop; with "" if the loop
    uses it otherwise too."""
    handed = [call for call in calls(loop) if dotted(call.func) in stored(loop.target)]
    given = [pair for call in handed for pair in zip(takes, call.args, strict=False)]
    given += [(keyword.arg or "", keyword.value) for call in handed for keyword in call.keywords]
    assigns = [node for node in walk(loop) if isinstance(node, ast.Assign)]
    plain = [(to.id, node.value) for node in assigns if isinstance(to := node.targets[0], ast.Name)]
    given += plain
    assigned = {to for to, _ in plain} - above - {name}
    receivers: list[str] = []
    for to, value in given:
        parts = value.elts if isinstance(value, ast.Tuple) else [value]
        parts = [p for part in parts for p in ([part.body, part.orelse] if isinstance(part, ast.IfExp) else [part])]
        receivers += [to] * sum(isinstance(part, ast.Name) and part.id == name for part in parts)
    others: set[str] = {""} if loaded(loop).count(name) > len(receivers) else set()
    aliases = (_taken_as(alias, loop, takes, above | {name}) for alias in assigned & set(receivers))
    return others.union(set(receivers) - assigned, *aliases)


def _attentions(anatomy: Anatomy, kinds: list[str], layers: str) -> dict[str, FunctionNode]:
    """The attention classes of the layers, which are of these classes, each with its forward."""
    below = anatomy.reached_from(kinds)
    forwards: dict[str, FunctionNode] = {}
    for name in (attention.name for attention in anatomy.with_role(Role.ATTENTION) if attention.name in below):
        method = anatomy.method(name, "forward")
        called = calls(method[1]) if method is not None else ()
        if method is None or not any(anatomy.names.is_upstream(call, LENGTHS_TEST) for call in called):
            raise LeftAlone(f"{name} does not choose between lengths and one call per input")
        if not any(_makes_one_row(call) for call in calls(method[1])):
            raise LeftAlone(f"{name} does not attend to all inputs in one row, [1, heads, rows, dim]")
        forwards[name] = method[1]
    if not forwards:
        raise LeftAlone(f"self.{layers} holds no attention of this file")
    return forwards


def _makes_one_row(call: ast.Call) -> bool:
    """Whether it is `x.unsqueeze(0)` or `x.reshape(1, ...)`."""
    match call:
        case ast.Call(ast.Attribute(_, "unsqueeze"), [ast.Constant(0)]) | ast.Call(
            ast.Attribute(_, "view" | "reshape"), [ast.Constant(1), *_]
        ):
            return True
    return False


def _group(anatomy: Anatomy, info: ClassInfo) -> str:
    """How many rows are merged after the layers, as source: the square of the config's side, from an attribute that holds
    the square or the side; "1" where the tower holds neither."""
    held = {name: value for one in reversed([*anatomy.lineage(info.name)]) for name, value in one.attributes.items()}

    def is_side(value: ast.AST) -> bool:
        return in_config(anatomy, info.name, value) in SINGLE_SIDES

    only = {name: value for name, value in held.items() if anatomy.held(info.name, name) == (value,)}
    for name, value in only.items():
        match value:
            case ast.BinOp(factor, ast.Mult(), other) if is_side(factor) and ast.unparse(factor) == ast.unparse(other):
                return f"self.{name}"
            case ast.BinOp(factor, ast.Pow(), ast.Constant(2)) if is_side(factor):
                return f"self.{name}"
    if group := next((f"self.{name}**2" for name, value in only.items() if is_side(value)), None):
        return group
    for name, value in held.items():
        read = {node.attr for node in walk(value) if isinstance(node, ast.Attribute)}
        read |= {node.value for node in walk(value) if isinstance(node, ast.Constant)}
        if name in SINGLE_SIDES and read & {*SINGLE_SIDES}:
            raise LeftAlone(f"self.{name} has the side of merged rows in a form that is not read")
    return "1"


def _gathers(
    anatomy: Anatomy,
    info: ClassInfo,
    body: list[ast.stmt],
    place: int,
    local: list[str],
    above: set[str],
    group: str,
) -> tuple[Gather, ...]:
    """Where results of the loop must be gathered to all rows: as late as possible, because they are smallest there; above a
    statement that is not known to work on a slice of the rows."""
    gathered = above - set(local) - {"self"}
    gather_points = list[Gather]()
    for number, statement in enumerate(body[place + 1 :], start=place + 1):
        read = set(loaded(statement))
        used = [name for name in local if name in read]
        if isinstance(statement, ast.Return):
            used = [name for name in used if name in _results(statement)]
        elif not used:
            gathered |= set(stored(statement))
            continue
        elif not read & gathered and _works_on_slices(anatomy, info, statement, group):
            local += [name for name in stored(statement) if name not in local]
            continue
        if used:
            gather_points.append((number, tuple(used)))
        local = [name for name in local if name not in used and name not in stored(statement)]
        gathered |= {*used, *stored(statement)}
    if not gather_points:
        raise LeftAlone("what its layers leave is never returned")
    return tuple(gather_points)


def _works_on_slices(anatomy: Anatomy, info: ClassInfo, statement: ast.stmt, group: str) -> bool:
    """Whether a statement hands rows to modules of the tower, or merges groups of rows, and assigns the result."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    parts = [ast.unparse(node) for node in walk(statement) if isinstance(node, ast.Subscript)]
    computed = any(isinstance(node, ast.operator | ast.cmpop) for node in walk(statement))
    if not isinstance(target, ast.Name) or computed or not all(part.endswith(".shape[-1]") for part in parts):
        return False
    merging = {b.attribute for b in info.builds if Role.NORM not in anatomy.classes[b.target or ""].roles}
    for call in calls(statement):
        own, name = own_attribute(call.func), dotted(call.func).rpartition(".")[2]
        is_known = own not in info.methods if own else name in REGROUPS
        if not is_known or (group == "1" and (own is None or own in merging)):
            return False
    return True


def _results(statement: ast.Return) -> set[str]:
    """The names in what a tower returns; with a `pooler_output`, without those of `last_hidden_state`."""
    value = statement.value
    if isinstance(value, ast.Call) and any(keyword.arg == "pooler_output" for keyword in value.keywords):
        return {name for k in value.keywords if k.arg != "last_hidden_state" for name in loaded(k.value)}
    return set(loaded(statement))


def _read_first(name: str, loop: ast.For) -> bool:
    uses = (s for s in loop.body if name in loaded(s) or (name in stored(s) and not isinstance(s, ast.If)))
    first = next(uses, None)
    return first is not None and name in loaded(first)


def towers_held_whole(anatomy: Anatomy, info: ClassInfo, language: set[str]) -> list[str]:
    """The attributes of a fusion model that get whole inputs on every rank: all modules that attend, except the language
    model (`language`) and the towers whose rows the passes divide."""
    held: list[str] = []
    for build in (*anatomy.builds(info.name), *anatomy.auto_builds(info.name)):
        if build.attribute is None or build.attribute in language:
            continue
        target = anatomy.target_of(build)
        known = anatomy.classes.get(target or "")
        if known is not None:
            below = [anatomy.classes[name] for name in anatomy.reached_from([known.name]) if name in anatomy.classes]
            attends = any(Role.ATTENTION in one.roles or anatomy.auto_builds(one.name) for one in below)
            if not attends or any(is_divided(anatomy, one) for one in below):
                continue
        held.append(build.attribute)
    return list(dict.fromkeys(held))
