"""Reads what routed experts with stacked weights compute; lists of expert modules are read by `expert_lists`.

The options of the fused call (activation, biases, layout) come from their loop over experts, or from a batched product. Experts
of another form stay as upstream wrote them; whether a written call computes what upstream computes is the proof's to say.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from patchgen.anatomy.classes import parameter_names
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.interpreter import Interpreter, Term
from patchgen.anatomy.operations import is_term
from patchgen.anatomy.roles import stack_shapes
from patchgen.errors import Missed


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
    sizes = [shape[0] for shape in _stacks(anatomy, owner).values()]
    counts = frozenset(count for size in sizes for count in num_experts_expressions(anatomy, owner, size))
    interpreter = Interpreter(anatomy, owner, forward, values, counts)
    attributes = sorted(counts, key=lambda count: (count.startswith("self.config."), count))
    if not attributes:
        raise Missed("the number of experts set in __init__, for example self.num_experts", owner)
    if loop is None and len(values) == 1:
        match interpreter.run(forward.body):
            case ("stacked rows", ("linear", ("mul", *_), *_) as output, _):
                return _formula(anatomy, owner, tuple(output), "", "", attributes[0])
            case other:
                found = term_text(other or ("none",))
                raise Missed("the rows of all experts concatenated along dim 0: bmm(...).view(-1, H)", found)
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
    match added:
        case ("mul", output, ("routing", ("value", weights), ("value", index))):
            return _formula(anatomy, owner, output, index, weights, attributes[0])
        case _:
            raise Missed("the expert output times its routing weight", term_text(added))


def _formula(anatomy: Anatomy, owner: str, output: Term, index: str, weights: str, num_experts: str) -> ExpertsFormula:
    """The formula of one expert's output: a row of this table of known forms, each from the inside out."""
    norm = None
    if output[0] == "call":
        _, norm, output = output
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
    return ExpertsFormula(
        hidden_states=hidden,
        top_k_index=index,
        top_k_weights=weights,
        num_experts=num_experts,
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


def _stacks(anatomy: Anatomy, owner: str) -> dict[str, list[str]]:
    """Attribute -> shape, as source, of every stack of matrices of the class."""
    return {name: shape for info in anatomy.lineage(owner) for name, shape in stack_shapes(anatomy, info).items()}


def num_experts_expressions(anatomy: Anatomy, owner: str, source: str) -> set[str]:
    """The expressions of `self` for the number of experts: those that the class sets to `source`, or `source` to."""
    same = {source}
    assigned = [
        (f"self.{name}", read_plain(value)) for i in anatomy.lineage(owner) for name, value in i.attributes.items()
    ]
    for pair in assigned * 2:
        same |= {*pair} if not same.isdisjoint(pair) else set()
    if ("self.config", "config") in assigned:
        same |= {f"self.{name}" for name in same if name.startswith("config.")}
    return {name for name in same if name.startswith("self.")}


def read_plain(value: ast.AST) -> str:
    """An expression as source; `config.name` for `getattr(config, "name", default)`."""
    match value:
        case ast.Call(ast.Name("getattr"), [holder, ast.Constant(str(name)), *_]):
            return f"{ast.unparse(holder)}.{name}"
        case _:
            return ast.unparse(value)


def term_text(term: Term) -> str:
    """A term as text for a message: `mul(call(act_fn, half(...)), ...)`."""
    inner = ", ".join(term_text(part) if is_term(part) else str(part) for part in term[1:] if part is not None)
    return f"{term[0]}({inner})" if inner else str(term[0])
