"""What routed experts compute, read from the loop over experts in their code: stacks of weights, or a list of modules.

The options of the fused call (activation, biases, layout) come from the code itself and not from flags beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from patchgen.anatomy.classes import (
    ClassInfo,
    FunctionNode,
    calls,
    own_attribute,
    parameter_names,
    reads_name,
    stored,
    uses,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.initialisation import METHOD
from patchgen.anatomy.interpreter import Interpreter, Term
from patchgen.anatomy.roles import LIST, is_gated_mlp, stack_shapes
from patchgen.anatomy.tokenwise import loaded_names, mixing_member, stored_names
from patchgen.errors import Missed

# What gives a module's stacks, or those of the modules below it, by no name of theirs.
WHOLE = {"parameters", "named_parameters", "get_parameter", "_parameters", "state_dict", "get_submodule"}
WHOLE |= {"modules", "named_modules", "children", "named_children", "_modules"}
NO_BIAS, BIAS, CONFIGURED_BIAS = "no", "yes", "as the config says"


@dataclass(frozen=True)
class ExpertsFormula:
    """`down(gate(up(x)))` of one expert, by the names of attributes of the experts module."""

    hidden_states: str  # the three parameters of forward
    top_k_index: str  # empty: each expert is handed as many rows, one after the other
    top_k_weights: str
    num_experts: str  # source
    up_weight: str
    down_weight: str
    up_bias: str | None = None
    down_bias: str | None = None
    is_transposed: bool = False  # `x @ W[e]` instead of `linear(x, W[e])`
    is_gated: bool = True
    activation: str | None = None  # attribute: activation(gate) * up
    apply_gate: str | None = None  # method: replaces activation and product
    post_norm: str | None = None  # attribute applied to the expert's output


@dataclass(frozen=True)
class ExpertList:
    """`self.<attribute> = nn.ModuleList([<expert> for _ in range(<num_experts>)])` and the parts of one expert."""

    attribute: str
    position: int  # of the statement in __init__
    expert: str  # source of the call that builds one expert
    expert_class: str
    num_experts: str  # source
    gate: str  # the four attributes of an expert: down(activation(gate(x)) * up(x))
    up: str
    down: str
    activation: str
    bias: str  # NO_BIAS, BIAS or CONFIGURED_BIAS


@dataclass(frozen=True)
class ExpertLoop:
    """The loop over a list of experts, by the names it reads and writes."""

    method: str
    position: int  # of the loop in the method
    accumulator: str
    hidden_states: str  # [T, H]
    top_k_index: str  # [T, K]
    top_k_weights: str  # [T, K]
    dtype: str | None  # source of the accumulator's dtype; None for that of the hidden states
    superseded: tuple[int, ...]  # positions of the statements that only the loop needed


# ------------------------------------------------------------------------------------------------- stacks of weights


def read_experts(anatomy: Anatomy, owner: str) -> ExpertsFormula:
    """Reads the forward of a stacked experts module.

    Raises:
        Missed: it computes something else than the sum over the experts, or more.
    """
    forward = anatomy.classes[owner].methods["forward"]
    loop = next((node for node in forward.body if isinstance(node, ast.For)), None)
    values = {name: ("value", name) for name in parameter_names(forward)}
    stacks = _stacks(anatomy, owner)
    counts = frozenset(c for shape in stacks.values() for c in _counts(anatomy, owner, shape[0]))
    interpreter = Interpreter(anatomy, owner, forward, values, counts)
    if loop is None and len(values) == 1:
        return _read_batched(anatomy, owner, interpreter.run(forward.body), sorted(counts))
    if loop is None:
        raise Missed("a loop over the experts that were hit", ast.unparse(forward)[:400])
    position = forward.body.index(loop)
    if interpreter.run(forward.body[:position]) is not None:
        raise Missed("a loop over the experts that were hit", forward.body[position - 1])
    accumulator, added = interpreter.loop(loop)
    interpreter.values[accumulator], interpreter.sum = ("sum",), None
    result = interpreter.run(forward.body[position + 1 :])
    if result not in (("sum",), ("cast", ("sum",))):
        raise Missed("the sum over the experts returned as it is, below the loop", forward.body[-1])
    return _weighted(anatomy, owner, added, sorted(counts))


def read_elsewhere(anatomy: Anatomy, owner: str, stacks: Sequence[str], among: Iterable[str]) -> str:
    """Code of the classes `among`, or of a function, that reads a stack of the experts beside their forward; empty if none
    does: there a rank that holds a part of the experts would take it for all of them."""
    own = {info.name for info in anatomy.lineage(owner)}
    forward = anatomy.classes[owner].methods["forward"]
    serving = {METHOD, "__init__", "forward", *(own_attribute(call.func) for call in calls(forward))}
    code = [("", function) for function in anatomy.functions.values()]
    for name in sorted(among):
        methods = anatomy.classes[name].methods.values()
        code += [(name, m) for m in methods if m.name != METHOD and not (name in own and m.name in serving)]
    nodes = [node for info in anatomy.classes.values() for node in ast.walk(info.node)]
    named = {"forward", *(node.attr for node in nodes if isinstance(node, ast.Attribute))}
    for name, function in code:
        runs = function.name != "__init__" and (not name or function.name in named)
        of_one = {id(_of_first(node)) for node in ast.walk(function)}
        for node in ast.walk(function):
            match node:
                case ast.Attribute(value, read, ast.Load()) | ast.Call(
                    ast.Name("getattr"), [value, ast.Constant(read), *_]
                ):
                    is_own = isinstance(value, ast.Name) and value.id == "self"
                    built = (
                        [b.target for b in anatomy.builds(name) if b.attribute == own_attribute(value)] if name else []
                    )
                    is_other = name not in own if is_own else bool(built) and not own & set(built)
                    is_whole = read in WHOLE and runs and id(node) not in of_one
                    if (read in stacks and not is_other) or (is_whole and _may_hold(anatomy, name, value, own)):
                        return f"{name or function.name} reads {ast.unparse(node)}"
    return ""


def _of_first(node: ast.AST) -> ast.expr | None:
    """What gives the parameter of `next(<module>.parameters()).dtype`: all that a module's parameters have in common."""
    match node:
        case ast.Attribute(ast.Call(ast.Name("next"), [ast.Call(read)]), "dtype" | "device"):
            return read
    return None


def _may_hold(anatomy: Anatomy, name: str, module: ast.expr, own: set[str]) -> bool:
    """Whether a module that a method of the class `name` reads is the experts, or is above them, as far as is known."""
    classes = _classes_of(anatomy, name, module)
    bases = {one for one in anatomy.classes if anatomy.is_model(one) and not anatomy.method(one, "forward")}
    return classes is None or bool(own & anatomy.reached_from(classes, without=bases))


def _classes_of(anatomy: Anatomy, name: str, module: ast.expr) -> set[str] | None:
    """The classes of this file that a module may be an instance of; None where the source does not tell."""
    match module:
        case ast.Name("self") if name:
            return {one for one in anatomy.classes if name in [info.name for info in anatomy.lineage(one)]}
        case ast.Subscript(inner):
            return _classes_of(anatomy, name, inner)
        case ast.Attribute(inner, attribute):
            owners = _classes_of(anatomy, name, inner)
            lineage = [info for owner in owners or () for info in anatomy.lineage(owner)]
            found = {b.target for i in lineage for b in i.builds if b.attribute == attribute}
            found |= {anatomy.target_of(b) for i in lineage for b in i.auto_builds if b.attribute == attribute}
            held = [value for owner in owners or () for value in anatomy.held(owner, attribute)]
            is_known = owners is not None and (found or (held and all(isinstance(one, ast.Call) for one in held)))
            return found - {None} if is_known else None
    return None


def _read_batched(anatomy: Anatomy, owner: str, result: Term | None, counts: Sequence[str]) -> ExpertsFormula:
    """Products of all experts at once: `x.view(E, -1, H)`, `bmm`, the gate, `bmm`, `.view(-1, H)`."""
    sizes = [("experts",), *(("size", ("self", name), 0) for name in _stacks(anatomy, owner))]
    match result:
        case ("together", ("linear", *_) as output, width):
            pass
        case _:
            raise Missed("the rows of all experts below each other: bmm(...).view(-1, H)", _told(result or ("none",)))
    formula = _formula(anatomy, owner, output, "", "", counts)
    shares = [term for term in _parts(output) if term[:1] == ("shares",)]
    if not shares or any(term[2] not in sizes or term[3] != width for term in shares):
        raise Missed("rows in as many parts as experts, x.view(E, -1, H), and put together as wide", _told(result))
    if not formula.is_gated or formula.activation is None:
        raise Missed("activation(gate) * up", _told(output))
    return formula


def _parts(term: Term) -> Iterator[Term]:
    """The term and all terms in it."""
    yield term
    for part in term:
        yield from _parts(part) if isinstance(part, tuple) else ()


def _weighted(anatomy: Anatomy, owner: str, added: Term, counts: Sequence[str]) -> ExpertsFormula:
    match added:
        case ("mul", output, ("routing", ("value", weights), ("value", index))):
            return _formula(anatomy, owner, output, index, weights, counts)
    raise Missed("the expert output times its routing weight", _told(added))


def _formula(
    anatomy: Anatomy, owner: str, output: Term, index: str, weights: str, counts: Sequence[str]
) -> ExpertsFormula:
    norm = None
    if output[0] == "call":
        _, norm, output = output
        _check_rows(anatomy, owner, norm, "a norm of each row of the output", fixed=False)
    match output:
        case ("linear", inner, down, down_bias, transposed):
            pass
        case _:
            raise Missed("a projection of the gated values", _told(output))
    match inner:
        case ("mul", ("call", function, ("half", first, 0)), ("half", other, 1)) if first == other:
            is_gated, is_own = True, False
        case ("call", function, first):
            is_gated = is_own = _is_halved(anatomy, owner, first, down, transposed)
        case _:
            raise Missed("activation(gate) * up, or a gate of the whole projection", _told(inner))
    match first:
        case ("linear", ("rows" | "shares" as rows, ("value", hidden), *_), up, up_bias, layout) if (
            layout == transposed and (rows == "rows") == bool(index)
        ):
            pass
        case _:
            raise Missed("a projection of the tokens, in the same layout as the second one", _told(first))
    fixed_rows = "an activation or a gate of each row by itself, without learned values"
    _check_rows(anatomy, owner, function, fixed_rows, fixed=True)
    for name in filter(None, (up, down, up_bias, down_bias)):
        _built(anatomy, owner, name, "nn.Parameter")
    own_counts = [count for count in counts if not count.startswith("self.config.")]
    if not own_counts:
        raise Missed("the number of experts set in __init__, for example self.num_experts", owner)
    return ExpertsFormula(
        hidden_states=hidden,
        top_k_index=index,
        top_k_weights=weights,
        num_experts=own_counts[0],
        up_weight=up,
        down_weight=down,
        up_bias=up_bias,
        down_bias=down_bias,
        is_transposed=transposed,
        is_gated=is_gated,
        activation=None if is_own else function,
        apply_gate=function if is_own else None,
        post_norm=norm,
    )


def _built(anatomy: Anatomy, owner: str, attribute: str, kind: str) -> ast.Call:
    """The one call of `kind` that makes what `self.<attribute>` holds."""
    held = anatomy.held(owner, attribute)
    if len(held) == 1 and isinstance(held[0], ast.Call) and anatomy.names.resolve(held[0].func) == f"torch.{kind}":
        return held[0]
    found = " or ".join(map(ast.unparse, held)) or f"no self.{attribute}"
    raise Missed(f"{owner}.{attribute} = {kind}(...)", found)


def _is_halved(anatomy: Anatomy, owner: str, first: Term, down: str, transposed: bool) -> bool:
    """Whether a gate makes `[rows, I]` of `[rows, 2I]`, as the shapes of the two weights say."""
    shapes = _stacks(anatomy, owner)
    up = first[2] if first[0] == "linear" else ""
    if up not in shapes or down not in shapes:
        raise Missed("two stacks of weights", _told(first))
    wide, narrow = shapes[up][2 if transposed else 1], shapes[down][1 if transposed else 2]
    if wide == narrow:
        return False
    if wide in (f"2 * {narrow}", f"{narrow} * 2"):
        return True
    raise Missed("a gate that makes one value of two", f"{up}: {wide}, {down}: {narrow}")


def _check_rows(anatomy: Anatomy, owner: str, attribute: str, expected: str, *, fixed: bool) -> None:
    mixed = mixing_member(anatomy, owner, attribute, fixed=fixed)
    if mixed is not None:
        raise Missed(expected, f"self.{attribute}: {mixed if isinstance(mixed, str) else ast.unparse(mixed)}")


def _stacks(anatomy: Anatomy, owner: str) -> dict[str, list[str]]:
    """The shape of every stack of matrices that the class holds, as source."""
    return {name: shape for info in anatomy.lineage(owner) for name, shape in stack_shapes(anatomy, info).items()}


def _counts(anatomy: Anatomy, owner: str, source: str, experts: str = "") -> set[str]:
    """The expressions that stand for the number of experts: `source`, and the attributes that hold the same."""
    known = {source}
    attributes = [name for info in anatomy.lineage(owner) for name in info.attributes]
    for _ in range(2):
        for name in attributes:
            held = [ast.unparse(value) for value in anatomy.held(owner, name)]
            if f"self.{name}" in known:
                known |= set(held[:1]) if len(held) == 1 else set()
            elif len(held) == 1 and held[0] in known:
                known.add(f"self.{name}")
    known |= {f"self.{count}" for count in known if count.startswith("config.") and "config" in attributes}
    own = {c for c in known if c.startswith("self.config.") or (c.startswith("self.") and anatomy.held(owner, c[5:]))}
    return own | ({f"len(self.{experts})"} if experts else set())


def _told(term: Term) -> str:
    """A term for a message: `mul(call(act_fn, half(...)), ...)`."""
    inner = ", ".join(_told(part) if isinstance(part, tuple) else str(part) for part in term[1:] if part is not None)
    return f"{term[0]}({inner})" if inner else str(term[0])


# ------------------------------------------------------------------------------------------------- lists of modules


def read_expert_list(anatomy: Anatomy, info: ClassInfo) -> tuple[ExpertList, ExpertLoop]:
    """Reads the list of experts that a class builds, and the loop of its method that runs them.

    Raises:
        Missed: either has another form.
    """
    experts = _read_list(anatomy, info)
    return experts, _read_loop(anatomy, info, experts)


def _read_list(anatomy: Anatomy, info: ClassInfo) -> ExpertList:
    init = info.methods["__init__"]
    lists = {b.attribute for b in info.builds if b.in_list and b.attribute and is_gated_mlp(anatomy, b.target)}
    if len(lists) != 1:
        raise Missed("one list of experts in the class", f"lists {sorted(lists)}")
    attribute = lists.pop()
    assigned = [s for s in ast.walk(init) if isinstance(s, ast.Assign) and own_attribute(s.targets[0]) == attribute]
    if len(assigned) != 1 or assigned[0] not in init.body:
        found = "\n".join(map(ast.unparse, assigned))
        raise Missed(f"one assignment to self.{attribute}, outside of any condition", found)
    statement = assigned[0]
    match getattr(statement.value, "args", None):
        case [ast.ListComp(ast.Call() as built, [loop]) | ast.GeneratorExp(ast.Call() as built, [loop])]:
            is_list = anatomy.names.resolve(statement.value.func) == LIST
        case _:
            is_list, loop = False, None
    match loop:
        case ast.comprehension(ast.Name(number), ast.Call(ast.Name("range"), [count]), []) if is_list:
            pass
        case _:
            raise Missed(f"self.{attribute} = nn.ModuleList([Expert(...) for _ in range(N)])", statement)
    if reads_name(built, number):
        raise Missed("experts that are built alike, whatever their number", statement)
    expert_class = (anatomy.names.resolve(built.func) or "").removeprefix(".")
    gate, up, down, activation = _read_expert(anatomy, expert_class)
    return ExpertList(
        attribute=attribute,
        position=init.body.index(statement),
        expert=ast.unparse(built),
        expert_class=expert_class,
        num_experts=ast.unparse(count),
        gate=gate,
        up=up,
        down=down,
        activation=activation,
        bias=_bias(anatomy, expert_class, (gate, up, down)),
    )


def _read_expert(anatomy: Anatomy, name: str) -> tuple[str, str, str, str]:
    """gate, up, down and activation of a forward that computes `down(activation(gate(x)) * up(x))`, no more."""
    found = anatomy.method(name, "forward")
    form = f"{name}.forward(x) that returns self.<down>(self.<activation>(self.<gate>(x)) * self.<up>(x))"
    if found is None or len(parameter_names(found[1])) != 1:
        raise Missed(form, name)
    x = ("value", parameter_names(found[1])[0])
    match Interpreter(anatomy, name, found[1], {x[1]: x}).run(found[1].body):
        case ("call", down, ("mul", ("call", act, ("call", gate, one)), ("call", up, two))) if one == two == x:
            pass
        case ("call", down, ("mul", ("call", up, one), ("call", act, ("call", gate, two)))) if one == two == x:
            pass
        case _:
            raise Missed(form, found[1])
    _check_rows(anatomy, name, act, "an activation of each row by itself, without learned values", fixed=True)
    return gate, up, down, act


def _bias(anatomy: Anatomy, name: str, projections: Sequence[str]) -> str:
    """Whether the three projections have a bias, as their `nn.Linear(...)` says."""
    found = set()
    for projection in projections:
        built = _built(anatomy, name, projection, "nn.Linear")
        given = [k.value for k in built.keywords if k.arg == "bias"] + built.args[2:3]
        constant = given[0].value if given and isinstance(given[0], ast.Constant) else None
        found.add(BIAS if not given or constant is True else NO_BIAS if constant is False else CONFIGURED_BIAS)
    if len(found) > 1:
        raise Missed("a bias in all three projections of an expert or in none", f"{name}: {sorted(found)}")
    return found.pop()


def _read_loop(anatomy: Anatomy, info: ClassInfo, experts: ExpertList) -> ExpertLoop:
    """The one loop of the class over its list of experts."""
    attribute = experts.attribute
    users = [m for m in info.methods.values() if m.name != "__init__" and uses(m, attribute)]
    if len(users) != 1:
        raise Missed(f"one method that runs self.{attribute}", f"methods {[user.name for user in users]}")
    method = users[0]
    loops = [i for i, s in enumerate(method.body) if isinstance(s, ast.For) and uses(s, attribute)]
    if len(loops) != 1:
        where = f"{info.name}.{method.name}"
        raise Missed(f"one loop over self.{attribute} in {where}, outside of any condition", method)
    position, loop = loops[0], method.body[loops[0]]
    counts = frozenset(_counts(anatomy, info.name, experts.num_experts, attribute))
    values = {name: ("value", name, -1) for name in parameter_names(method)}
    interpreter = Interpreter(anatomy, info.name, method, values, counts, attribute)
    made = _run_above(interpreter, method.body[:position])
    above = dict(interpreter.values)
    accumulator, added = interpreter.loop(loop)
    match added:
        case ("mul", ("expert", ("rows", hidden, _)), ("routing", weights, selection)):
            pass
        case _:
            raise Missed("ACC.index_add_(0, tokens, expert(X[tokens]) * W[tokens, slots, None])", _told(added))
    names = [_name_of(term, above, loop) for term in (hidden, selection, weights)]
    born = max(i for i, made_names in made.items() if accumulator in made_names)
    _check_around(method, position, born, accumulator)
    dtype = _dtype(method.body[born].value, names[0])
    unread = {i: own for i, own in made.items() if all(above[name][0] != "zeros" for name in own)}
    superseded = _superseded(method.body, (position, born), unread)
    return ExpertLoop(method.name, position, accumulator, *names, dtype, superseded)


def _run_above(interpreter: Interpreter, body: Sequence[ast.stmt]) -> dict[int, set[str]]:
    """Runs what stands above the loop. What is not understood gives its names new values that stand for themselves.

    Returns:
        position -> names, of the statements that made masks, lists of experts that were hit, and zeros.
    """
    made: dict[int, set[str]] = {}
    for position, statement in enumerate(body):
        before, stored = dict(interpreter.values), stored_names(statement)
        try:
            interpreter.statement(statement)
        except Missed:
            interpreter.values = before | {name: ("value", name, position) for name in stored}
        interpreter.sum = None
        if stored and all(interpreter.values[n][0] in ("mask", "hits", "count_of", "hit", "zeros") for n in stored):
            made[position] = stored
    return made


def _name_of(term: Term, values: dict[str, Term], loop: ast.For) -> str:
    """A name that still holds the value where the loop begins."""
    names = [name for name, value in values.items() if value == term]
    used = loaded_names(loop)
    if not names:
        raise Missed(f"no new value of {term[1]} between its use above the loop and the loop", loop)
    return next((name for name in names if name in used), names[0])


def _check_around(method: FunctionNode, position: int, born: int, accumulator: str) -> None:
    """The sum is read below the loop alone, and the loop's own names are not."""
    for statement in method.body[born + 1 : position]:
        if reads_name(statement, accumulator):
            raise Missed(f"no use of {accumulator} before the loop", statement)
    written = set(stored(method.body[position])) - {accumulator}
    for statement in method.body[position + 1 :]:
        later = loaded_names(statement) & written
        if later:
            raise Missed(f"no use of the loop's own {', '.join(sorted(later))} after it", statement)


def _dtype(zeros: ast.Call, hidden: str) -> str | None:
    """The source of the dtype of `torch.zeros(...)` or `torch.zeros_like(x)`; None for that of the hidden states."""
    given = next((ast.unparse(k.value) for k in zeros.keywords if k.arg == "dtype"), None)
    if given is None:
        is_like = isinstance(zeros.func, ast.Attribute) and zeros.func.attr == "zeros_like"
        given = f"{ast.unparse(zeros.args[0])}.dtype" if is_like else "torch.get_default_dtype()"
    return None if given == f"{hidden}.dtype" else given


def _superseded(body: Sequence[ast.stmt], replaced: tuple[int, int], made: dict[int, set[str]]) -> tuple[int, ...]:
    """The zeros, and the statements that made masks and hit list, less those whose result something else reads.

    `replaced` are the positions of the loop and of the zeros.
    """
    gone = dict(made)
    while True:
        rest = [statement for i, statement in enumerate(body) if i not in gone and i not in replaced]
        needed = {i for i, names in gone.items() if any(reads_name(s, name) for s in rest for name in names)}
        if not needed:
            return tuple(sorted({*gone, replaced[1]}))
        gone = {i: names for i, names in gone.items() if i not in needed}
