"""Lists of expert modules and the loops over them: what is needed to build and call a class of stacked weights instead.

A list may be built in a method that `__init__` calls, or in one branch while another builds a single rank's experts. A loop
adds up weighted outputs token by token, or gives each expert its rows of all `[T * K]`; then the K outputs of a token are
added up below the loop.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from patchgen.anatomy.classes import (
    ClassInfo,
    FunctionNode,
    loaded,
    mentions,
    own_attribute,
    parameter_names,
    setup_calls,
    stored,
    stored_names,
    uses,
    walk,
)
from patchgen.anatomy.experts import num_experts_expressions, read_plain, term_text
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.interpreter import ExpertCall, Interpreter, Term
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import LINEAR, LIST, is_gated_mlp
from patchgen.errors import Missed

NO_BIAS, BIAS, CONFIGURED_BIAS = "no", "yes", "as the config says"
PROMOTED = "torch.promote_types(hidden_states.dtype, top_k_weights.dtype)"
"""The dtype of outputs times weights, by the parameter names of the stacked class."""
MASKS = {"mask", "hits", "count_of", "hit"}
# Of a statement: its position, or the position of an `if`, the branch (0 or 1), and the place in that branch.
Place = tuple[int, ...]


@dataclass(frozen=True)
class ExpertList:
    """`self.<attribute> = nn.ModuleList([<expert> for _ in range(<num_experts>)])` and the parts of one expert."""

    attribute: str
    method: str  # __init__, or one that it calls
    place: Place  # of the statement in the method
    parts: tuple[Place, ...]  # of the statements that build one rank's experts instead, in other branches
    constants: dict[str, Term]  # attribute -> number, as set in the branch that builds the whole list
    expert: str  # source of the call that builds one expert
    expert_class: str
    num_experts: str  # source
    gate: str  # the four attributes of an expert: down(activation(gate(x)) * up(x))
    up: str
    down: str
    activation: str
    bias: str  # NO_BIAS, BIAS or CONFIGURED_BIAS
    called: ExpertCall


@dataclass(frozen=True)
class ExpertLoop:
    """The loop over a list of experts, by the names it reads and writes."""

    method: str
    place: Place  # of the statement that a call replaces: the loop, or what adds up its outputs
    accumulator: str  # the name of the sum; empty: the method returns it
    hidden_states: str  # [T, H]
    top_k_index: str  # [T, K]
    top_k_weights: str  # [T, K]
    dtype: str | None  # source of the accumulator's dtype; None for that of the hidden states
    inside: str | None  # the same by the parameter names of the stacked class: outputs are added up in it
    superseded: tuple[int, ...]  # positions, in the same block, of statements that only the loop needed


def read_expert_list(anatomy: Anatomy, info: ClassInfo) -> tuple[ExpertList, list[ExpertLoop]]:
    """Reads the list of experts that a class builds, and the loops in its methods that run them. Raises Missed if one
    of them has an unknown form, or other code uses the list."""
    experts = _read_list(anatomy, info)
    attribute, building = experts.attribute, {"__init__", experts.method}
    users = [m for m in info.methods.values() if m.name not in building and uses(m, attribute)]
    if not users:
        raise Missed(f"a method that runs self.{attribute}", info.name)
    loops = [_read_loop(anatomy, info, experts, method) for method in users]
    if len(dtypes := {str(loop.inside) for loop in loops}) > 1:
        raise Missed("one dtype in which the outputs of experts are added up", ", ".join(dtypes))
    return experts, loops


def expert_lists(anatomy: Anatomy, info: ClassInfo) -> set[str]:
    """The attributes that the class sets to lists of experts."""
    return {b.attribute for b in info.builds if b.in_list and b.attribute and is_gated_mlp(anatomy, b.target)}


def _read_list(anatomy: Anatomy, info: ClassInfo) -> ExpertList:
    lists = expert_lists(anatomy, info)
    if len(lists) != 1:
        raise Missed("one list of experts in the class", f"lists {sorted(lists)}")
    attribute = lists.pop()

    def sets(statement: ast.stmt) -> bool:
        stores = (n for n in walk(statement) if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load))
        return any(own_attribute(target) == attribute for target in stores)

    assignments = [(m, place) for m in info.methods.values() for place in _places(m.body, sets)]
    built = {place: _comprehension(anatomy, attribute, statement_at(m.body, place)) for m, place in assignments}
    list_places = [place for place, (call, _) in built.items() if isinstance(call, ast.Call)]
    methods = {m.name: m for m, _ in assignments}
    parts = tuple(place for place in built if place not in list_places)
    is_called = len(methods) == 1 and {*methods} <= {"__init__", *setup_calls(info)}
    apart = len(list_places) == 1 and all(p[:-2] == list_places[0][:-2] and p[-2] != list_places[0][-2] for p in parts)
    if not (is_called and apart and (parts or len(list_places[0]) == 1)):
        assigned_code = "\n".join(ast.unparse(statement_at(m.body, place)) for m, place in assignments)
        raise Missed(
            f"one assignment to self.{attribute}, or another in the other branch for one rank's experts", assigned_code
        )
    (method,), (call, count) = methods.values(), built[list_places[0]]
    if not isinstance(call, ast.Call):
        raise Missed("experts that a call builds", call)
    expert_class = (anatomy.names.resolve(call.func) or "").removeprefix(".")  # of a library, for the message
    (gate, up, down, activation), called = _read_expert(anatomy, expert_class)
    beside: Sequence[ast.stmt] = branch_of(method.body, list_places[0]) if parts else []
    within = {id(n) for place in parts for s in branch_of(method.body, place) for n in ast.walk(s)}
    constants: dict[str, Term] = {}
    for statement in beside:
        match statement:
            case ast.Assign([ast.Attribute(ast.Name("self"), name)], ast.Constant(number) as value):
                if all(held is value or id(held) in within for held in anatomy.held(info.name, name)):
                    constants[name] = ("const", number)
    return ExpertList(
        attribute=attribute,
        method=method.name,
        place=list_places[0],
        parts=parts,
        constants=constants,
        expert=ast.unparse(call),
        expert_class=expert_class,
        num_experts=ast.unparse(count),
        gate=gate,
        up=up,
        down=down,
        activation=activation,
        bias=_bias(anatomy, expert_class, (gate, up, down)),
        called=called,
    )


def _places(body: Sequence[ast.stmt], is_wanted: Callable[[ast.stmt], bool]) -> Iterator[Place]:
    """The places of the statements that `is_wanted` accepts, also in branches of an `if`."""
    for position, statement in enumerate(body):
        if isinstance(statement, ast.If):
            for branch, inside in enumerate((statement.body, statement.orelse)):
                yield from ((position, branch, *place) for place in _places(inside, is_wanted))
        elif is_wanted(statement):
            yield (position,)


def statement_at(body: Sequence[ast.stmt], place: Place) -> ast.stmt:
    return branch_of(body, place)[place[-1]]


def branch_of(body: Sequence[ast.stmt], place: Place) -> Sequence[ast.stmt]:
    """The block that contains the statement at a place."""
    for position, branch in zip(place[:-1:2], place[1::2], strict=True):
        statement = body[position]
        assert isinstance(statement, ast.If)
        body = (statement.body, statement.orelse)[branch]
    return body


def _comprehension(anatomy: Anatomy, attribute: str, statement: ast.stmt) -> tuple[ast.expr, ast.expr]:
    """`(E(...), N)` of `nn.ModuleList([E(...) for _ in range(N)])`; for one rank's experts, E is `E(...) if <cond> else None`."""
    match statement:
        case ast.Assign([_], ast.Call(holder, [ast.ListComp(built, [loop]) | ast.GeneratorExp(built, [loop])])):
            match loop:
                case ast.comprehension(ast.Name(number), ast.Call(numbers, [count]), []) if (
                    anatomy.names.resolve(holder) == LIST and anatomy.names.resolve(numbers) == "builtins.range"
                ):
                    if isinstance(built, ast.Call) and mentions(built, number):
                        raise Missed("experts that are built alike, whatever their number", statement)
                    return built, count
    raise Missed(f"self.{attribute} = nn.ModuleList([Expert(...) for _ in range(N)])", statement)


def _read_expert(anatomy: Anatomy, name: str) -> tuple[tuple[str, str, str, str], ExpertCall]:
    """gate, up, down and activation of a forward that computes exactly `down(activation(gate(x)) * up(x))`, or that times
    another parameter; and how it is called."""
    forward = anatomy.method(name, "forward")
    form = f"{name}.forward(x) that returns self.<down>(self.<activation>(self.<gate>(x)) * self.<up>(x))"
    names = parameter_names(forward[1]) if forward is not None else []
    if forward is None or not names:
        raise Missed(form, name)
    values = {name: ("value", name) for name in names}
    x, scale = values[names[0]], ""
    result = Interpreter(anatomy, name, forward[1], values).run(forward[1].body)
    match result:
        case ("mul", inner, ("value", scale)):
            result = inner
    match result:
        case ("call", down, ("mul", ("call", act, ("call", gate, in1)), ("call", up, in2))) if in1 == in2 == x:
            pass
        case ("call", down, ("mul", ("call", up, in2), ("call", act, ("call", gate, in1)))) if in1 == in2 == x:
            pass
        case _:
            raise Missed(form, forward[1])
    return (gate, up, down, act), ExpertCall(tuple(names), scale)


def _bias(anatomy: Anatomy, name: str, projections: Sequence[str]) -> str:
    """Whether the three projections have a bias by their `nn.Linear(...)`: `NO_BIAS`, `BIAS` or `CONFIGURED_BIAS`."""
    bias_kinds: set[str] = set()
    for projection in projections:
        built = next((info.built[projection] for info in anatomy.lineage(name) if projection in info.built), None)
        if built is None or not anatomy.is_a(built, LINEAR):
            raise Missed(f"{name}.{projection} = nn.Linear(...)", name)
        given = [k.value for k in built.keywords if k.arg == "bias"] + built.args[2:3]
        constant = given[0].value if given and isinstance(given[0], ast.Constant) else None
        bias_kinds.add(BIAS if not given or constant is True else NO_BIAS if constant is False else CONFIGURED_BIAS)
    if len(bias_kinds) > 1:
        raise Missed("a bias in all three projections of an expert or in none", f"{name}: {sorted(bias_kinds)}")
    return bias_kinds.pop()


def _read_loop(anatomy: Anatomy, info: ClassInfo, experts: ExpertList, method: FunctionNode) -> ExpertLoop:
    """Reads the only loop of a method over the list of experts."""
    attribute = experts.attribute
    places = [*_places(method.body, lambda one: isinstance(one, ast.For) and bool(uses(one, attribute)))]
    if len(places) != 1:
        where = f"{info.name}.{method.name}"
        raise Missed(f"one loop over self.{attribute} in {where}, outside of any condition but if and else", method)
    place, body = places[0], branch_of(method.body, places[0])
    counted = ast.parse(experts.num_experts, mode="eval").body
    counts = frozenset({*num_experts_expressions(anatomy, info.name, read_plain(counted)), f"len(self.{attribute})"})
    values = {name: ("value", name, -1) for name in parameter_names(method)}

    def above_loop(without: Collection[int] = ()) -> tuple[Interpreter, dict[int, dict[str, Term]]]:
        started = Interpreter(anatomy, info.name, method, values, counts, attribute, experts.called, experts.constants)
        return started, _run_above(started, method.body, place, local_names(method), without)

    interpreter, terms_above = above_loop()
    above = dict(interpreter.values)
    loop = body[place[-1]]
    assert isinstance(loop, ast.For)
    accumulator, added = interpreter.loop(loop)
    match added:
        case ("mul", ("expert", ("rows", hidden, _)), ("routing", weights, selection)):
            pass
        case (("placed" | "outputs"), *_):
            interpreter.values[accumulator], interpreter.sum = added, None
            position, name, result = _combined(interpreter, body, place[-1])
            terms_above = {i: {n: term for n, term in terms.items() if n != name} for i, terms in terms_above.items()}
            gone = _superseded(body, {*range(place[-1], position + 1)}, terms_above, _below(method.body, place))
            again, _ = above_loop(without=gone)
            _, *terms = result[1] if result[0] == "cast" else result
            hidden, index, weights = (_name_of(term, again.values, body[position]) for term in terms)
            promoted = f"torch.promote_types({hidden}.dtype, {weights}.dtype)"
            dtype = f"{hidden}.dtype" if result[0] == "cast" else promoted
            gone, place = (*gone, *range(place[-1], position)), (*place[:-1], position)
            return ExpertLoop(method.name, place, name, hidden, index, weights, dtype, PROMOTED, gone)
        case _:
            raise Missed("ACC.index_add_(0, tokens, expert(X[tokens]) * W[tokens, slots, None])", term_text(added))
    x, index, routing = (_name_of(term, above, loop) for term in (hidden, selection, weights))
    created = max(i for i, terms in terms_above.items() if accumulator in terms)
    _check_around([*body, *_below(method.body, place)], place[-1], created, accumulator)
    match above[accumulator]:
        case ("zeros", ("dtype", of)) if of in (hidden, weights):
            dtype, inside = (None, None) if of == hidden else (f"{routing}.dtype", "top_k_weights.dtype")
        case ("zeros", ("library", name)):
            dtype = inside = name
        case ("zeros", ("promoted", *of)) if {*of} == {hidden, weights}:
            dtype, inside = f"torch.promote_types({x}.dtype, {routing}.dtype)", PROMOTED
        case ("zeros", None):
            dtype = inside = "torch.get_default_dtype()"
        case _:
            expected = "an accumulator in the dtype of the hidden states, of the routing weights, or a named one"
            raise Missed(expected, body[created])
    masks = {i: terms for i, terms in terms_above.items() if terms and {t[0] for t in terms.values()} <= MASKS}
    gone = _superseded(body, {place[-1], created}, masks, _below(method.body, place))
    return ExpertLoop(method.name, place, accumulator, x, index, routing, dtype, inside, (*gone, created))


def _run_above(
    interpreter: Interpreter,
    body: Sequence[ast.stmt],
    place: Place,
    local: Collection[str],
    without: Collection[int] = (),
) -> dict[int, dict[str, Term]]:
    """Runs the statements above the loop. One that is not understood gives the names that it binds new, opaque values.

    Returns:
        Position -> name -> term, of the statements in the loop's block that made masks, zeros, rows and the like.
    """
    terms_by_position: dict[int, dict[str, Term]] = {}
    for depth in range(1, len(place) + 1, 2):
        is_beside = depth == len(place)
        for position, statement in enumerate(branch_of(body, place[:depth])[: place[depth - 1]]):
            if is_beside and position in without:
                continue
            before, names = dict(interpreter.values), stored_names(statement, local)
            try:
                interpreter.statement(statement)
            except Missed:
                interpreter.values = before | {name: ("value", name, (depth, position)) for name in names}
            interpreter.sum = None
            terms = {name: term for name, term in interpreter.values.items() if before.get(name) != term}
            if is_beside and names and all(term[0] != "value" for term in terms.values()):
                terms_by_position[position] = terms
    return terms_by_position


def _combined(interpreter: Interpreter, body: Sequence[ast.stmt], loop: int) -> tuple[int, str, Term]:
    """Position, name and term of the sum of each token's outputs, made below a loop; the name is empty if it is returned."""
    combined = None
    for position in range(loop + 1, len(body)):
        statement = body[position]
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Name) and combined:
            return combined if statement.value.id != combined[1] else (position, "", combined[2])
        if combined:
            return combined
        if isinstance(statement, ast.Return) and statement.value is not None:
            combined = (position, "", interpreter.value(statement.value))
        else:
            interpreter.statement(statement)
            name = next(iter(stored(statement)), "")
            combined = (position, name, interpreter.values.get(name, ("none",)))
        if (combined[2][1] if combined[2][0] == "cast" else combined[2])[0] != "combined":
            combined = None
    if combined is None:
        raise Missed("the outputs of a token times their weights, added up below the loop", body[loop])
    return combined


def _below(body: Sequence[ast.stmt], place: Place) -> list[ast.stmt]:
    """The statements that follow the `if`s around a place."""
    depths = range(1, len(place), 2)
    return [s for depth in depths for s in branch_of(body, place[:depth])[place[depth - 1] + 1 :]]


def _name_of(term: Term, values: dict[str, Term], node: ast.stmt) -> str:
    """A name that still holds the term at a statement; one that the statement reads, if there is one."""
    names = [name for name, value in values.items() if value == term]
    used = set(loaded(node))
    if not names:
        raise Missed(f"no new value of {term[1]} between its use above the loop and the loop", node)
    return next((name for name in names if name in used), names[0])


def _check_around(body: Sequence[ast.stmt], position: int, created: int, accumulator: str) -> None:
    """Raises `Missed` if the sum is used between its creation and the loop, or names bound in the loop are read after it."""
    for statement in body[created + 1 : position]:
        if mentions(statement, accumulator):
            raise Missed(f"no use of {accumulator} before the loop", statement)
    written = set(stored(body[position])) - {accumulator}
    for statement in body[position + 1 :]:
        later = set(loaded(statement)) & written
        if later:
            raise Missed(f"no use of the loop's own {', '.join(sorted(later))} after it", statement)


def _superseded(
    body: Sequence[ast.stmt],
    replaced: Collection[int],
    terms_above: dict[int, dict[str, Term]],
    below: Sequence[ast.stmt],
) -> tuple[int, ...]:
    """The positions of the statements that made masks and the like which nothing but the loop reads. Raises Missed if
    rows that are repeated for the loop are read elsewhere."""
    gone = dict(terms_above)
    while True:
        remaining = [(i, s) for i, s in enumerate(body) if i not in gone and i not in replaced]
        remaining += [(len(body), s) for s in below]
        needed = {
            i: s
            for i, terms in gone.items()
            for at, s in remaining
            if at > i and any(_reads(s, *name_and_term) for name_and_term in terms.items())
        }
        for i, statement in needed.items():
            if any(term[0] == "repeated" for term in gone[i].values()):
                raise Missed("no use of the repeated rows but the loop over experts", statement)
        if not needed:
            return tuple(sorted(gone))
        gone = {i: terms for i, terms in gone.items() if i not in needed}


def _reads(statement: ast.stmt, name: str, term: Term) -> bool:
    """Whether a statement reads a name; the dtype and device of repeated rows, equal to those of the rows, do not count."""
    nodes = [n for n in walk(statement) if isinstance(n, ast.Attribute) and n.attr in ("dtype", "device")]
    alike: set[int] = {id(node.value) for node in nodes} if term[0] == "repeated" else set()
    return any(isinstance(n, ast.Name) and n.id == name and id(n) not in alike for n in walk(statement))
