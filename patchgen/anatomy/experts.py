"""Reads what a stack of experts computes from the loop over experts in its forward.

The loop is executed symbolically, statement by statement, so the options of the fused call (activation, biases,
layout) come from the code itself and not from flags beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
        setup = _Setup(names)
        for statement in _flat(forward.body[: forward.body.index(loop)]):
            setup.read(statement)
        result = _Reader(names, setup).read(loop)
        _check_below(forward, loop, setup)
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


def _check_below(forward: FunctionNode, loop: ast.For, setup: _Setup) -> None:
    """Nothing but the loop may compute: the seam replaces all of the forward."""
    *between, last = forward.body[forward.body.index(loop) + 1 :] or [loop]
    value = last.value if isinstance(last, ast.Return) else None
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in RESHAPES:
        value = value.func.value
    if between or not isinstance(value, ast.Name) or value.id != setup.accumulator:
        raise Unreadable("the sum over the experts returned as it is, below the loop", last)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, those under `with torch.no_grad():` too."""
    for statement in body:
        if isinstance(statement, ast.With) and ast.unparse(statement.items[0]) == "torch.no_grad()":
            yield from _flat(statement.body)
        else:
            yield statement


class _Setup:
    """What stands above the loop: a sum that begins with zeros, the mask of the selection, the experts that were hit.

    Of the dtype of the sum nothing is asked: it may be fp32 for bf16 tokens, and the fused call adds up in fp32 too.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.hidden, self.index, _ = names
        self.accumulator = ""
        self.one_hot = self.mask = self.hits = ""  # names; `mask` is [E, K, T], the one-hot [T, K, E]

    def read(self, statement: ast.stmt) -> None:
        simple = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        target = statement.targets[0] if simple else None
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return  # a docstring
        if not isinstance(target, ast.Name) or target.id in self.names or not self._assign(target.id, statement.value):
            raise Unreadable("zeros, mask and list of experts, and nothing else, above the loop over them", statement)

    def _assign(self, name: str, value: ast.expr) -> bool:
        if isinstance(value, ast.Call) and dotted(value.func) == "torch.zeros_like" and not self.accumulator:
            self.accumulator = name
            return [ast.unparse(arg) for arg in value.args] == [self.hidden]
        if self._is_mask(value):
            self.mask = name
        elif self._is_one_hot(value):
            self.one_hot = name
        elif self.is_hits(value):
            self.hits = name
        else:
            return ast.unparse(value) == f"{self.hidden}.dtype"
        return True

    def _is_one_hot(self, node: ast.expr) -> bool:
        if not (isinstance(node, ast.Call) and dotted(node.func).endswith("one_hot") and node.args):
            return False
        classes = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
        known = ("self.num_experts", "self.num_experts + 1")  # one more: the expert of tokens that have none
        return ast.unparse(node.args[0]) == self.index and [ast.unparse(c) in known for c in classes] == [True]

    def _is_mask(self, node: ast.expr) -> bool:
        """A one-hot, `.permute(2, 1, 0)`."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "permute"):
            return False
        source = node.func.value
        made = self._is_one_hot(source) or (isinstance(source, ast.Name) and source.id == self.one_hot)
        return made and [ast.unparse(arg) for arg in node.args] == ["2", "1", "0"]

    def is_hits(self, node: ast.expr) -> bool:
        """`torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()`, with or without the comparison, or its name."""
        if isinstance(node, ast.Name):
            return node.id == self.hits
        count = f"{self.mask}.sum(dim=(-1, -2))"
        forms = (f"torch.greater({count}, 0).nonzero()", f"{count}.nonzero()")
        return bool(self.mask) and ast.unparse(node).removesuffix(".squeeze(-1)") in forms


class _Reader:
    def __init__(self, names: list[str], setup: _Setup) -> None:
        self.hidden, self.index, self.weights = names
        self.setup = setup
        self.expert = self.slot = self.token = ""  # names in the loop
        self.values: dict[str, _Term] = {}

    def read(self, loop: ast.For) -> _Term | None:
        is_range = ast.unparse(loop.iter) == "range(self.num_experts)"
        if not isinstance(loop.target, ast.Name) or loop.orelse or not (is_range or self.setup.is_hits(loop.iter)):
            raise Unreadable(
                "a loop over all experts that were hit", f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
            )
        self.expert = loop.target.id
        result = None
        for statement in _flat(loop.body):
            call = statement.value if isinstance(statement, ast.Expr) else None
            if result is not None:
                raise Unreadable("nothing below the index_add_ in the loop", statement)
            if isinstance(call, ast.Call) and dotted(call.func).endswith("index_add_"):
                result = self._sum(call)
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], statement.value)
            elif not self._is_guard(statement):
                raise Unreadable("plain assignments from one value to the next, then one index_add_", statement)
        return result

    def _is_guard(self, statement: ast.stmt) -> bool:
        """`continue` for the expert of tokens that have none, or where there are no tokens."""
        if not isinstance(statement, ast.If) or statement.orelse or len(statement.body) != 1:
            return False
        known = (f"{self.expert} == self.num_experts", f"{self.token}.numel() == 0")
        return isinstance(statement.body[0], ast.Continue) and ast.unparse(statement.test) in known

    def _sum(self, call: ast.Call) -> _Term:
        """`ACC.index_add_(0, token, weighted)`, cast to the dtype of the sum, which index_add_ demands."""
        target = ast.unparse(call.func.value)
        places = [ast.unparse(arg) for arg in call.args[:2]]
        if len(call.args) != 3 or call.keywords or target != self.setup.accumulator or places != ["0", self.token]:
            raise Unreadable("<zeros>.index_add_(0, <rows>, <weighted output>)", call)
        weighted = call.args[2]
        if isinstance(weighted, ast.Call) and isinstance(weighted.func, ast.Attribute) and weighted.func.attr == "to":
            dtypes = (f"{target}.dtype", f"{self.hidden}.dtype")
            if [ast.unparse(arg) in dtypes for arg in weighted.args] == [True]:
                weighted = weighted.func.value
        return self._weighted(weighted)

    def _weighted(self, node: ast.expr) -> _Term:
        term = self._value(node)
        if term is None or term.kind != "weighted":
            raise Unreadable("the expert output times its routing weight", node)
        return term.up

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            self._assign_two(target, value)
            return
        if not isinstance(target, ast.Name) or target.id in (*self.setup.names, self.setup.accumulator):
            raise Unreadable("a value on the way, by a name of its own", target)
        if target.id == self.expert and ast.unparse(value) in (f"{self.expert}[0]", f"{self.expert}.item()"):
            return
        term = self._value(value)
        if term is None:
            raise Unreadable("a statement of the usual loop over experts", value)
        self.values[target.id] = term

    def _assign_two(self, target: ast.Tuple, value: ast.expr) -> None:
        names = [element.id for element in target.elts if isinstance(element, ast.Name)]
        if len(names) == 2 and ast.unparse(value) == f"torch.where({self.setup.mask}[{self.expert}])":
            self.slot, self.token = names
            return
        halves = self._chunk(value)
        if halves is None or len(names) != 2:
            raise Unreadable("slots and tokens of an expert, or gate and up", value)
        self.values |= dict(zip(names, halves, strict=True))

    def _chunk(self, node: ast.expr) -> tuple[_Term, _Term] | None:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "chunk"):
            return None
        source = self._value(node.func.value)
        if source is None or source.kind != "projected":
            raise Unreadable("a chunk of the first projection into gate and up", node)
        if [ast.unparse(arg) for arg in (*node.args, *(k.value for k in node.keywords))] != ["2", "-1"]:
            raise Unreadable("a chunk into two halves of the last dimension", node)
        return _Term("gate", up=source), _Term("up", up=source)

    def _value(self, node: ast.expr) -> _Term | None:
        if isinstance(node, ast.Name):
            return self.values.get(node.id)
        if isinstance(node, ast.Subscript) and ast.unparse(node) == f"{self.hidden}[{self.token}]":
            return _Term("token")
        if isinstance(node, ast.BinOp):
            return self._operator(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        return None

    def _operator(self, node: ast.BinOp) -> _Term | None:
        left = self._value(node.left)
        if isinstance(node.op, ast.MatMult) and left is not None:
            weight = self._expert_slice(node.right)
            if weight is None:
                raise Unreadable("a product with one expert's weight, self.<weight>[expert]", node)
            return self._project(left, weight, transposed=True, node=node)
        if isinstance(node.op, ast.Add) and left is not None:
            bias = self._expert_slice(node.right)
            if bias is None or left.kind not in ("projected", "output"):
                raise Unreadable("a bias added to a projection, self.<bias>[expert]", node)
            return _Term(**{**left.__dict__, "bias": bias})
        if isinstance(node.op, ast.Mult):
            right = self._value(node.right)
            if left is not None and left.kind == "output" and self._is_routing(node.right):
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
        if isinstance(node.func, ast.Attribute) and self._value(node.func.value) is not None:
            if method == "contiguous":
                return self._value(node.func.value)
            raise Unreadable("no cast or other change of a value on the way", node)
        if method == "linear" and len(node.args) >= 2:
            inner, weight = self._value(node.args[0]), self._expert_slice(node.args[1])
            if inner is None or weight is None:
                raise Unreadable("linear(rows, self.<weight>[expert])", node)
            term = self._project(inner, weight, transposed=False, node=node)
            given = [*node.args[2:], *(keyword.value for keyword in node.keywords)]
            bias = self._expert_slice(given[0]) if given else None
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

    def _expert_slice(self, node: ast.expr) -> str | None:
        """`gate_up_proj` for `self.gate_up_proj[expert]`, as it is: a cast of a weight is another result."""
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            owner = node.value.value
            if isinstance(owner, ast.Name) and owner.id == "self" and ast.unparse(node.slice) == self.expert:
                return node.value.attr
        return None

    def _is_routing(self, node: ast.expr) -> bool:
        """`weights[token, slot, None]`, or with another way to add the dimension."""
        pair = f"{self.weights}[{self.token}, {self.slot}"
        return ast.unparse(node) in (f"{pair}, None]", f"{pair}].unsqueeze(-1)", f"{pair}].unsqueeze(1)")
