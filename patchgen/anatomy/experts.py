"""Reads what a stack of experts computes from the loop over experts in its forward.

The loop is executed symbolically, statement by statement, so the options of the fused call (activation, biases,
layout) come from the code itself and not from flags beside it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from patchgen.anatomy.classes import FunctionNode, dotted, parameter_names

RESHAPES = ("to", "type", "type_as", "view", "reshape", "contiguous")  # leave every number as it is


@dataclass(frozen=True)
class ExpertsFormula:
    """`down(gate(up(x)))` of one expert, by the names of attributes of the experts module."""

    hidden_states: str  # the three parameters of forward
    top_k_index: str
    top_k_weights: str
    up_weight: str = ""
    down_weight: str = ""
    up_bias: str | None = None
    down_bias: str | None = None
    is_transposed: bool = False  # `x @ W[e]` instead of `linear(x, W[e])`
    is_gated: bool = True
    activation: str | None = None  # attribute: activation(gate) * up
    apply_gate: str | None = None  # method: replaces activation and product
    post_norm: str | None = None  # attribute applied to the expert's output


@dataclass(frozen=True)
class Unread:
    """Why the loop could not be read, with the code that was in the way."""

    expected: str
    found: str


@dataclass(frozen=True)
class _Term:
    """A symbolic value: what it is, with the attributes that made it so far."""

    kind: str  # token, projected, gate, up, activated, gated, output, weighted
    weight: str = ""
    bias: str | None = None
    transposed: bool = False
    function: str | None = None  # activation or apply_gate
    norm: str | None = None
    up: _Term | None = None  # for everything after the gate: the first projection


class Unreadable(Exception):
    """What was expected, and the code that stands there."""

    def __init__(self, expected: str, node: ast.AST | str) -> None:
        super().__init__(expected)
        self.expected, self.found = expected, node if isinstance(node, str) else ast.unparse(node)


def read_experts(forward: FunctionNode) -> ExpertsFormula | Unread:
    """Reads the forward of a stacked experts module."""
    names = parameter_names(forward)[:3]
    if len(names) < 3:
        return Unread("a forward of (hidden states, top-k index, top-k weights)", f"parameters {names}")
    loop = next((node for node in forward.body if isinstance(node, ast.For)), None)
    if loop is None:
        return Unread("a loop over the experts that were hit", ast.unparse(forward)[:400])
    try:
        _check_around(forward, loop, names)
        result = _Reader(*names).read(loop)
    except Unreadable as error:
        return Unread(error.expected, error.found)
    if result is None:
        return Unread("an index_add_ of the weighted expert output", ast.unparse(loop)[:600])
    gated = result.up
    return ExpertsFormula(
        *names,
        up_weight=gated.up.weight,
        up_bias=gated.up.bias,
        down_weight=result.weight,
        down_bias=result.bias,
        is_transposed=result.transposed,
        is_gated=gated.kind in ("gated", "applied"),
        activation=gated.function if gated.kind != "applied" else None,
        apply_gate=gated.function if gated.kind == "applied" else None,
        post_norm=result.norm,
    )


def _check_around(forward: FunctionNode, loop: ast.For, names: list[str]) -> None:
    """Nothing but the loop may compute: the seam replaces all of the forward."""
    for statement in forward.body[: forward.body.index(loop)]:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
                raise Unreadable(f"`{node.id}` as it comes, up to the loop over the experts", statement)
    *between, last = forward.body[forward.body.index(loop) + 1 :] or [loop]
    value = last.value if isinstance(last, ast.Return) else None
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in RESHAPES:
        value = value.func.value
    if between or not isinstance(value, ast.Name):
        raise Unreadable("the sum over the experts returned as it is, below the loop", last)


class _Reader:
    def __init__(self, hidden: str, index: str, weights: str) -> None:
        self.hidden, self.index, self.weights = hidden, index, weights
        self.values: dict[str, _Term] = {}

    def read(self, loop: ast.For) -> _Term | None:
        result = None
        for statement in loop.body:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(call, ast.Call) and dotted(call.func).endswith("index_add_") and result is None:
                if len(call.args) != 3 or call.keywords:
                    raise Unreadable("index_add_(0, rows, weighted output)", statement)
                result = self._weighted(call.args[2])
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1 and result is None:
                self._assign(statement.targets[0], statement.value)
            elif self._touches(statement):
                raise Unreadable("plain assignments from one value to the next, then one index_add_", statement)
        return result

    def _touches(self, statement: ast.stmt) -> bool:
        """Whether a statement of another kind reads or writes a value on the way."""
        return any(isinstance(node, ast.Name) and node.id in self.values for node in ast.walk(statement))

    def _weighted(self, node: ast.expr) -> _Term:
        term = self._value(node)
        if term is None or term.kind != "weighted":
            raise Unreadable("the expert output times its routing weight", node)
        return term.up

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            halves = self._chunk(value)
            if halves and len(target.elts) == 2:
                for name, half in zip(target.elts, halves, strict=True):
                    self.values[name.id] = half
            return
        term = self._value(value)
        if isinstance(target, ast.Name):
            if term is None:
                self.values.pop(target.id, None)
            else:
                self.values[target.id] = term

    def _chunk(self, node: ast.expr) -> tuple[_Term, _Term] | None:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "chunk"):
            return None
        source = self._value(node.func.value)
        if source is None or source.kind != "projected":
            raise Unreadable("a chunk of the first projection into gate and up", node)
        return _Term("gate", up=source), _Term("up", up=source)

    def _value(self, node: ast.expr) -> _Term | None:
        if isinstance(node, ast.Name):
            return self.values.get(node.id)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return _Term("token") if node.value.id == self.hidden else None
        if isinstance(node, ast.BinOp):
            return self._operator(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        return None

    def _operator(self, node: ast.BinOp) -> _Term | None:
        left = self._value(node.left)
        if isinstance(node.op, ast.MatMult) and left is not None:
            weight = _expert_slice(node.right)
            if weight is None:
                raise Unreadable("a product with one expert's weight, self.<weight>[expert]", node)
            return self._project(left, weight, transposed=True, node=node)
        if isinstance(node.op, ast.Add) and left is not None:
            bias = _expert_slice(node.right)
            if bias is None or left.kind not in ("projected", "output"):
                raise Unreadable("a bias added to a projection, self.<bias>[expert]", node)
            return _Term(**{**left.__dict__, "bias": bias})
        if isinstance(node.op, ast.Mult):
            right = self._value(node.right)
            if left is not None and left.kind == "output" and _base_name(node.right) == self.weights:
                return _Term("weighted", up=left)
            if left is not None and right is not None and {left.kind, right.kind} == {"activated", "up"}:
                activated = left if left.kind == "activated" else right
                return _Term("gated", function=activated.function, up=left.up)
            if left is not None or right is not None:
                raise Unreadable("activation(gate) * up, or the output times its routing weight", node)
        return None

    def _call(self, node: ast.Call) -> _Term | None:
        name = dotted(node.func)
        method = name.rpartition(".")[2]
        if isinstance(node.func, ast.Attribute) and method in ("float", "to", "type_as", "contiguous"):
            return self._value(node.func.value)
        if method == "linear" and len(node.args) >= 2:
            inner, weight = self._value(node.args[0]), _expert_slice(node.args[1])
            if inner is None or weight is None:
                raise Unreadable("linear(rows, self.<weight>[expert])", node)
            term = self._project(inner, weight, transposed=False, node=node)
            given = [*node.args[2:], *(keyword.value for keyword in node.keywords)]
            bias = _expert_slice(given[0]) if given else None
            if len(given) > 1 or (given and bias is None):
                raise Unreadable("linear(rows, self.<weight>[expert], self.<bias>[expert])", node)
            return _Term(**{**term.__dict__, "bias": bias})
        if name.startswith("self.") and len(node.args) == 1:
            return self._own_call(name.removeprefix("self."), self._value(node.args[0]), node)
        return None

    def _own_call(self, attribute: str, inner: _Term | None, node: ast.Call) -> _Term | None:
        if inner is None:
            return None
        if inner.kind == "gate":
            return _Term("activated", function=attribute, up=inner.up)
        if inner.kind == "projected":
            kind = "applied" if "gate" in attribute else "ungated"
            return _Term(kind, function=attribute, up=inner)
        if inner.kind == "output" and inner.norm is None:
            return _Term(**{**inner.__dict__, "norm": attribute})
        raise Unreadable("an activation, a gate or a norm of the output", node)

    def _project(self, inner: _Term, weight: str, *, transposed: bool, node: ast.AST) -> _Term:
        if inner.kind == "token":
            return _Term("projected", weight=weight, transposed=transposed)
        if inner.kind in ("gated", "applied", "ungated"):
            if inner.up.transposed != transposed:
                raise Unreadable("both weights in the same layout", node)
            return _Term("output", weight=weight, transposed=transposed, up=inner)
        raise Unreadable("a projection of the tokens or of the gated values", node)


def _expert_slice(node: ast.expr) -> str | None:
    """`gate_up_proj` for `self.gate_up_proj[expert]`, casts read through."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
        node = node.func.value
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
        owner = node.value.value
        if isinstance(owner, ast.Name) and owner.id == "self" and isinstance(node.slice, ast.Name):
            return node.value.attr
    return None


def _base_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id
    return None
