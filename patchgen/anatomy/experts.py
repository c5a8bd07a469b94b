"""Reads what routed experts with stacked weights compute; lists of expert modules are read by `expert_lists`.

The options of the fused call (activation, biases, layout) come from their loop over experts, or from a batched product.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from patchgen.anatomy.classes import calls, loaded, own_attribute, parameter_names, stored, walk
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.initialisation import METHOD
from patchgen.anatomy.interpreter import Interpreter, Term
from patchgen.anatomy.names import is_of_config
from patchgen.anatomy.operations import is_term
from patchgen.anatomy.roles import stack_shapes
from patchgen.anatomy.tokenwise import mixing_member
from patchgen.errors import Missed

# Members of torch modules that give access to parameters or submodules without naming one.
# fmt: off
MODULE_CONTENTS = {
    "parameters", "named_parameters", "get_parameter", "_parameters", "state_dict", "get_submodule",
    "modules", "named_modules", "children", "named_children", "_modules", "__dict__", "__getattr__", "__getattribute__",
}
# fmt: on


@dataclass(frozen=True)
class ExpertsFormula:
    """`down(gate(gate_up(x)))` of one expert, by the attribute names of the experts module."""

    hidden_states: str  # the three parameters of forward
    top_k_index: str  # empty: rows come sorted by expert, the same number for each
    top_k_weights: str
    num_experts: str  # as source text
    gate_up_weight: str  # gate and up stacked; up alone where the experts have no gate
    down_weight: str
    gate_up_bias: str | None = None
    down_bias: str | None = None
    is_transposed: bool = False  # `x @ W[e]` instead of `linear(x, W[e])`
    is_gated: bool = True
    activation: str | None = None  # attribute: activation(gate) * up
    apply_gate: str | None = None  # method that replaces the activation and the product
    post_norm: str | None = None  # attribute applied to the expert's output


def read_experts(anatomy: Anatomy, owner: str) -> ExpertsFormula:
    """Reads the forward of a stacked experts module. Raises Missed if it computes anything but the sum over the experts."""
    forward = anatomy.classes[owner].methods["forward"]
    loop = next((node for node in forward.body if isinstance(node, ast.For)), None)
    values = {name: ("value", name) for name in parameter_names(forward)}
    stacks = _stacks(anatomy, owner)
    sizes = [shape[0] for shape in stacks.values()]
    counts = frozenset(count for size in sizes for count in num_experts_expressions(anatomy, owner, size))
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


def other_reader(anatomy: Anatomy, owner: str, stacks: Sequence[str], among: Iterable[str]) -> str:
    """Says which code outside the experts' forward, in the classes `among` or in a function, reads a stack; empty if none does.

    On a rank that holds a part of the experts, such code would take that part for all of them.
    """
    lineage_names = {info.name for info in anatomy.lineage(owner)}
    forward = anatomy.classes[owner].methods["forward"]
    own_methods = {METHOD, "__init__", "forward", *(own_attribute(call.func) for call in calls(forward))}
    code = [("", function) for function in anatomy.functions.values()]
    for name in sorted(among):
        own = own_methods if name in lineage_names else {METHOD}
        code += [(name, method) for method in anatomy.classes[name].methods.values() if method.name not in own]
    nodes = [node for info in anatomy.classes.values() for node in walk(info.node)]
    referenced_names = {"forward", *(node.attr for node in nodes if isinstance(node, ast.Attribute))}
    for name, function in code:
        may_run = function.name != "__init__" and (not name or function.name in referenced_names)
        metadata_reads = {id(_parameters_read_for_metadata(node)) for node in walk(function)}
        for node in walk(function):
            for value, read in _attribute_reads(anatomy, node):
                is_own = isinstance(value, ast.Name) and value.id == "self"
                read_from = own_attribute(value)
                built = [b.target for b in anatomy.builds(name) if read_from and b.attribute == read_from]
                is_other = name not in lineage_names if is_own else bool(built) and not lineage_names & set(built)
                reads_contents = read in MODULE_CONTENTS and may_run and id(node) not in metadata_reads
                reads_contents = reads_contents and _may_hold(anatomy, name, value, lineage_names)
                if reads_contents or (read in stacks and not is_other):
                    return f"{name or function.name} reads {ast.unparse(node)}"
    return ""


def _attribute_reads(anatomy: Anatomy, node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """The attributes that an expression reads, each with what it is read from; `__dict__` if the source does not say which."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not _is_not_module(anatomy, node.value):
        yield node.value, node.attr
    if not isinstance(node, ast.Call):
        return
    called = anatomy.names.resolve(node.func)
    if called == "operator.attrgetter":  # of whatever the getter is called with
        paths = [str(path.value) if isinstance(path, ast.Constant) else "__dict__" for path in node.args]
        yield from ((node, read) for path in paths for read in path.split("."))
    elif called in ("builtins.getattr", "builtins.vars") and node.args and not _is_not_module(anatomy, node.args[0]):
        name = node.args[1] if len(node.args) > 1 else None
        yield node.args[0], str(name.value) if isinstance(name, ast.Constant) else "__dict__"


def _is_not_module(anatomy: Anatomy, value: ast.expr) -> bool:
    """Whether a value is a config or something from another file, such as `torch` in `getattr(torch, name)`."""
    meaning = anatomy.names.resolve(value)
    return is_of_config(value) or (meaning is not None and not meaning.startswith("."))


def _parameters_read_for_metadata(node: ast.AST) -> ast.expr | None:
    """`<module>.parameters` in `next(<module>.parameters()).dtype` or `.device`, which all parameters have in common."""
    match node:
        case ast.Attribute(ast.Call(ast.Name("next"), [ast.Call(read)]), "dtype" | "device"):
            return read
        case _:
            return None


def _may_hold(anatomy: Anatomy, name: str, module: ast.expr, lineage_names: set[str]) -> bool:
    """Whether a module that a method of the class `name` reads from may be the experts or contain them."""
    classes = _classes_of(anatomy, name, module)
    # Every model class names such a base, whose `_init_weights` may name the experts without containing them.
    bases = {one for one in anatomy.classes if anatomy.is_model(one) and not anatomy.method(one, "forward")}
    return classes is None or bool(lineage_names & anatomy.reached_from(classes, without=bases))


def _classes_of(anatomy: Anatomy, name: str, module: ast.expr) -> set[str] | None:
    """The classes of this file that a module may be an instance of; None if the source does not say."""
    match module:
        case ast.Name("self") if name:
            return {*anatomy.below(name)}
        case ast.Subscript(inner):
            return _classes_of(anatomy, name, inner)
        case ast.Attribute(inner, attribute):
            owners = _classes_of(anatomy, name, inner)
            lineage = [info for owner in owners or () for info in anatomy.lineage(owner)]
            targets = {b.target for i in lineage for b in i.builds if b.attribute == attribute}
            targets |= {anatomy.target_of(b) for i in lineage for b in i.auto_builds if b.attribute == attribute}
            values = [value for owner in owners or () for value in anatomy.held(owner, attribute)]
            is_built = bool(values) and all(isinstance(value, ast.Call) for value in values)
            is_known = owners is not None and (targets or is_built)
            return {target for target in targets if target} if is_known else None
        case _:
            return None


def _read_batched(
    anatomy: Anatomy, owner: str, result: Term | None, count_expressions: Sequence[str]
) -> ExpertsFormula:
    """Reads a product of all experts at once: `x.view(E, -1, H)`, `bmm`, the gate, `bmm`, `.view(-1, H)`."""
    sizes = [("experts",), *(("size", ("self", name), 0) for name in _stacks(anatomy, owner))]
    match result:
        case ("stacked rows", output, width) if output[0] == "linear":
            pass
        case _:
            raise Missed(
                "the rows of all experts concatenated along dim 0: bmm(...).view(-1, H)",
                term_text(result or ("none",)),
            )
    formula = _formula(anatomy, owner, output, "", "", count_expressions)
    shares = [term for term in _parts(output) if term[:1] == ("shares",)]
    if not shares or any(term[2] not in sizes or term[3] != width for term in shares):
        expected = "rows split into one part per expert, x.view(E, -1, H), and reshaped back to the same width"
        raise Missed(expected, term_text(result))
    if not formula.is_gated or formula.activation is None:
        raise Missed("activation(gate) * up", term_text(output))
    return formula


def _parts(term: Term) -> Iterator[Term]:
    """The term and all terms in it."""
    yield term
    for part in term:
        yield from _parts(part) if is_term(part) else ()


def _weighted(anatomy: Anatomy, owner: str, added: Term, count_expressions: Sequence[str]) -> ExpertsFormula:
    match added:
        case ("mul", output, ("routing", ("value", weights), ("value", index))):
            return _formula(anatomy, owner, output, index, weights, count_expressions)
        case _:
            raise Missed("the expert output times its routing weight", term_text(added))


def _formula(
    anatomy: Anatomy, owner: str, output: Term, index: str, weights: str, count_expressions: Sequence[str]
) -> ExpertsFormula:
    norm = None
    if output[0] == "call":
        _, norm, output = output
        require_rowwise(anatomy, owner, norm, "a norm of each row of the output", fixed=False)
    match output:
        case ("linear", inner, down, down_bias, transposed):
            pass
        case _:
            raise Missed("a projection of the gated values", term_text(output))
    match inner:
        case ("mul", ("call", function, ("half", first, 0)), ("half", other, 1)) if first == other:
            is_gated, has_custom_gate = True, False
        case ("call", function, first):
            is_gated = has_custom_gate = _is_halved(anatomy, owner, first, down, transposed)
        case _:
            raise Missed("activation(gate) * up, or a gate of the whole projection", term_text(inner))
    match first:
        case ("linear", ("rows" | "shares" as rows, ("value", hidden), *_), up, up_bias, up_transposed) if (
            up_transposed == transposed and (rows == "rows") == bool(index)
        ):
            pass
        case _:
            raise Missed("a projection of the tokens, in the same layout as the second one", term_text(first))
    expected = "an activation or a gate of each row by itself, without learned values"
    require_rowwise(anatomy, owner, function, expected, fixed=True)
    for name in filter(None, (up, down, up_bias, down_bias)):
        single_call(anatomy, owner, name, "nn.Parameter")
    attribute_counts = [count for count in count_expressions if not count.startswith("self.config.")]
    if not attribute_counts:
        raise Missed("the number of experts set in __init__, for example self.num_experts", owner)
    return ExpertsFormula(
        hidden_states=hidden,
        top_k_index=index,
        top_k_weights=weights,
        num_experts=attribute_counts[0],
        gate_up_weight=up,
        down_weight=down,
        gate_up_bias=up_bias,
        down_bias=down_bias,
        is_transposed=transposed,
        is_gated=is_gated,
        activation=None if has_custom_gate else function,
        apply_gate=function if has_custom_gate else None,
        post_norm=norm,
    )


def single_call(anatomy: Anatomy, owner: str, attribute: str, kind: str) -> ast.Call:
    """The call of torch's `kind` (`nn.Linear`) that `self.<attribute>` is set to; raises `Missed` if it has another value."""
    values = anatomy.held(owner, attribute)
    match values:
        case [ast.Call(function) as call] if anatomy.names.resolve(function) == f"torch.{kind}":
            return call
        case _:
            pass
    assigned_code = " or ".join(map(ast.unparse, values)) or f"no self.{attribute}"
    raise Missed(f"{owner}.{attribute} = {kind}(...)", assigned_code)


def _is_halved(anatomy: Anatomy, owner: str, first: Term, down: str, transposed: bool) -> bool:
    """Whether a gate maps `[rows, 2I]` to `[rows, I]`, by the shapes of the two weights."""
    shapes = _stacks(anatomy, owner)
    up = first[2] if first[0] == "linear" else ""
    if up not in shapes or down not in shapes:
        raise Missed("two stacks of weights", term_text(first))
    wide, narrow = shapes[up][2 if transposed else 1], shapes[down][1 if transposed else 2]
    if wide == narrow:
        return False
    if wide in (f"2 * {narrow}", f"{narrow} * 2"):
        return True
    raise Missed("a gate that maps [rows, 2I] to [rows, I]", f"{up}: {wide}, {down}: {narrow}")


def require_rowwise(anatomy: Anatomy, owner: str, attribute: str, expected: str, *, fixed: bool) -> None:
    """Raises `Missed` unless `self.<attribute>(rows)` treats each row by itself, with `fixed` without parameters."""
    mixed = mixing_member(anatomy, owner, attribute, fixed=fixed)
    if mixed is not None:
        raise Missed(expected, f"self.{attribute}: {mixed if isinstance(mixed, str) else ast.unparse(mixed)}")


def _stacks(anatomy: Anatomy, owner: str) -> dict[str, list[str]]:
    """Attribute -> shape, as source, of every stack of matrices of the class."""
    return {name: shape for info in anatomy.lineage(owner) for name, shape in stack_shapes(anatomy, info).items()}


def num_experts_expressions(anatomy: Anatomy, owner: str, source: str, experts: str = "") -> set[str]:
    """The expressions of `self` for the number of experts: those equal to `source`, and the length of the list `experts`."""
    known = {source} if _has_one_meaning(anatomy, owner, source) else set[str]()
    attributes = [name for info in anatomy.lineage(owner) for name in info.attributes]
    for _ in range(2):
        for name in attributes:
            values = [ast.unparse(value) for value in anatomy.held(owner, name)]
            if len(values) != 1 or not _has_one_meaning(anatomy, owner, values[0]):
                continue
            if f"self.{name}" in known:
                known.add(values[0])
            elif values[0] in known:
                known.add(f"self.{name}")
    if [ast.unparse(value) for value in anatomy.held(owner, "config")] == ["config"]:
        known |= {f"self.{count}" for count in known if count.startswith("config.")}
    of_self = [count.removeprefix("self.") for count in known if count.startswith("self.")]
    known_of_self = {f"self.{c}" for c in of_self if c.startswith("config.") or anatomy.held(owner, c)}
    return known_of_self | ({f"len(self.{experts})"} if experts else set())


def _has_one_meaning(anatomy: Anatomy, owner: str, source: str) -> bool:
    """Whether an expression is the same number wherever the class and its ancestors use it: its names are those of the only
    `__init__`, which binds each once."""
    inits = [info.methods["__init__"] for info in anatomy.lineage(owner) if "__init__" in info.methods]
    names = {*loaded(ast.parse(source))} - {"self"}
    bound = [name for init in inits for name in (*parameter_names(init), *stored(init))]
    return not names or (len(inits) == 1 and all(bound.count(name) <= 1 for name in names))


def term_text(term: Term) -> str:
    """A term as text for a message: `mul(call(act_fn, half(...)), ...)`."""
    inner = ", ".join(term_text(part) if is_term(part) else str(part) for part in term[1:] if part is not None)
    return f"{term[0]}({inner})" if inner else str(term[0])
