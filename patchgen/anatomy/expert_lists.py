"""Reads a list of expert modules: how `__init__` builds it, and what one expert computes.

self.experts = nn.ModuleList([ExpertMLP(config) for _ in range(N)])
def forward(self, x): return self.down(self.act(self.gate(x)) * self.up(x))
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from patchgen.anatomy.classes import ClassInfo, dotted, own_attribute, parameter_names, reads_name
from patchgen.anatomy.expert_loops import ExpertLoop, is_range, read_loop
from patchgen.anatomy.experts import Unread, Unreadable
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.roles import gated_product, is_gated_mlp

NO_BIAS, BIAS, CONFIGURED_BIAS = "no", "yes", "as the config says"


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


def read_expert_list(anatomy: Anatomy, info: ClassInfo) -> tuple[ExpertList, ExpertLoop] | Unread:
    """Reads the list of experts that a class builds, and the loop of its method that runs them."""
    try:
        experts = _read_list(anatomy, info)
        return experts, read_loop(info, experts.attribute, experts.num_experts)
    except Unreadable as error:
        return Unread(error.expected, error.found)


def _read_list(anatomy: Anatomy, info: ClassInfo) -> ExpertList:
    init = info.methods["__init__"]
    lists = {b.attribute for b in info.builds if b.in_list and b.attribute and is_gated_mlp(anatomy, b.target)}
    if len(lists) != 1:
        raise Unreadable("one list of experts in the class", f"lists {sorted(lists)}")
    attribute = lists.pop()
    assigned = [s for s in ast.walk(init) if isinstance(s, ast.Assign) and own_attribute(s.targets[0]) == attribute]
    if len(assigned) != 1 or assigned[0] not in init.body:
        raise Unreadable(
            f"one assignment to self.{attribute}, outside of any condition", "\n".join(map(ast.unparse, assigned))
        )
    statement = assigned[0]
    form = f"self.{attribute} = nn.ModuleList([Expert(...) for _ in range(N)])"
    value = statement.value
    if not (isinstance(value, ast.Call) and dotted(value.func).endswith("ModuleList") and len(value.args) == 1):
        raise Unreadable(form, statement)
    items = value.args[0]
    if not isinstance(items, ast.ListComp | ast.GeneratorExp) or len(items.generators) != 1:
        raise Unreadable(form, statement)
    loop, built = items.generators[0], items.elt
    if loop.ifs or not isinstance(loop.target, ast.Name) or not is_range(loop.iter) or not isinstance(built, ast.Call):
        raise Unreadable(form, statement)
    if reads_name(built, loop.target.id):
        raise Unreadable("experts that are built alike, whatever their number", statement)
    expert_class = dotted(built.func)
    gate, up, down, activation = _read_expert(anatomy, expert_class)
    return ExpertList(
        attribute=attribute,
        position=init.body.index(statement),
        expert=ast.unparse(built),
        expert_class=expert_class,
        num_experts=ast.unparse(loop.iter.args[0]),
        gate=gate,
        up=up,
        down=down,
        activation=activation,
        bias=_bias(anatomy, expert_class, (gate, up, down)),
    )


def _read_expert(anatomy: Anatomy, name: str) -> tuple[str, str, str, str]:
    """gate, up, down and activation of a forward that computes `down(activation(gate(x)) * up(x))`, no more."""
    forward = anatomy.method(name, "forward")[1]
    product = gated_product(forward)
    names = parameter_names(forward)
    form = f"{name}.forward(x) that returns self.<down>(self.<activation>(self.<gate>(x)) * self.<up>(x))"
    if product is None or len(names) != 1:
        raise Unreadable(form, forward)
    values: dict[str, str] = {names[0]: "x"}

    def value(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return values.get(node.id)
        if node is product:
            inputs = (product.left.args[0].args, product.right.args)
            return "gated" if all(len(args) == 1 and value(args[0]) == "x" for args in inputs) else None
        if (
            isinstance(node, ast.Call)
            and own_attribute(node.func)
            and len(node.args) == 1
            and value(node.args[0]) == "gated"
        ):
            downs.append(own_attribute(node.func))
            return "output"
        return None

    downs: list[str] = []
    for statement in forward.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.Return) and statement.value and value(statement.value) == "output":
            own = (
                own_attribute(product.left.args[0].func),
                own_attribute(product.right.func),
                downs[-1],
                own_attribute(product.left.func),
            )
            if all(own):
                return own
        known = value(statement.value) if isinstance(statement, ast.Assign) else None
        if known is None or not isinstance(statement.targets[0], ast.Name):
            break
        values[statement.targets[0].id] = known
    raise Unreadable(form, forward)


def _bias(anatomy: Anatomy, name: str, projections: Sequence[str]) -> str:
    """Whether the three projections have a bias, as their `nn.Linear(...)` says."""
    found = set()
    for projection in projections:
        built = anatomy.attribute(name, projection)
        if not (isinstance(built, ast.Call) and dotted(built.func).rpartition(".")[2] == "Linear"):
            raise Unreadable(
                f"{name}.{projection} = nn.Linear(...)", built or f"no self.{projection} in {name}.__init__"
            )
        given = [k.value for k in built.keywords if k.arg == "bias"] + built.args[2:3]
        constant = given[0].value if given and isinstance(given[0], ast.Constant) else None
        found.add(BIAS if not given or constant is True else NO_BIAS if constant is False else CONFIGURED_BIAS)
    if len(found) > 1:
        raise Unreadable("a bias in all three projections of an expert or in none", f"{name}: {sorted(found)}")
    return found.pop()
