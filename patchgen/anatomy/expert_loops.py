"""Reads the loop that routes tokens to a list of expert modules.

    for e in ...: ACC.index_add_(0, t, self.experts[e](X[t]) * W[t, k, None])

The loop is executed symbolically. A statement that is not understood ends the reading: half an understanding of a loop
would be a wrong model.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patchgen.anatomy.classes import ClassInfo, FunctionNode, dotted, own_attribute, reads_name
from patchgen.anatomy.experts import Unreadable


@dataclass(frozen=True)
class ExpertLoop:
    """The loop over the experts, by the names it reads and writes."""

    method: str
    position: int  # of the loop in the method
    accumulator: str
    hidden_states: str  # [T, H]
    top_k_index: str  # [T, K]
    top_k_weights: str  # [T, K]
    dtype: str | None  # source of the accumulator's dtype; None for that of the hidden states
    superseded: tuple[int, ...]  # positions of the statements that only the loop needed


def is_range(node: ast.expr) -> bool:
    """Whether the expression is `range(n)`."""
    return isinstance(node, ast.Call) and dotted(node.func) == "range" and len(node.args) == 1


@dataclass(frozen=True)
class _Mask:
    """A one-hot of the selected experts, by the order of its dimensions: t token, k slot, e expert."""

    selected: str
    order: str
    line: int  # position of the one_hot


def read_loop(info: ClassInfo, attribute: str, num_experts: str) -> ExpertLoop:
    """Reads the one loop of the class over `self.<attribute>`, a list of `num_experts` (source) modules.

    Raises:
        Unreadable: with the code that was in the way.
    """
    users = [
        m
        for m in info.methods.values()
        if m.name != "__init__" and any(own_attribute(n) == attribute for n in ast.walk(m))
    ]
    if len(users) != 1:
        raise Unreadable(f"one method that runs self.{attribute}", f"methods {[user.name for user in users]}")
    method = users[0]
    loops = [
        i
        for i, s in enumerate(method.body)
        if isinstance(s, ast.For) and any(own_attribute(n) == attribute for n in ast.walk(s))
    ]
    if len(loops) != 1:
        raise Unreadable(
            f"one loop over self.{attribute} in {info.name}.{method.name}, outside of any condition", method
        )
    position = loops[0]
    setup = _Setup(method.body[:position])
    routed = _LoopBody(attribute, setup, _counts(info, attribute, num_experts)).read(method.body[position])
    if routed.accumulator not in setup.zeros:
        raise Unreadable(f"{routed.accumulator} = torch.zeros(...) before the loop", method.body[position])
    born, dtype = setup.zeros[routed.accumulator]
    _check_untouched(method, position, setup, routed, born)
    return ExpertLoop(
        method=method.name,
        position=position,
        accumulator=routed.accumulator,
        hidden_states=routed.hidden_states,
        top_k_index=routed.top_k_index,
        top_k_weights=routed.top_k_weights,
        dtype=None if dtype == f"{routed.hidden_states}.dtype" else dtype,
        superseded=_superseded(method.body, position, {born: routed.accumulator}, setup.positions),
    )


def _check_untouched(method: FunctionNode, position: int, setup: _Setup, routed: _Routed, born: int) -> None:
    """The names that the loop reads mean at the loop what they meant where mask and accumulator were made."""
    loop = method.body[position]
    if setup.stored.get(routed.top_k_index, -1) > routed.mask_line >= 0:
        raise Unreadable(f"no new value of {routed.top_k_index} between its mask and the loop", method)
    if setup.stored.get(routed.hidden_states, -1) > born:
        raise Unreadable(f"no new value of {routed.hidden_states} between the accumulator and the loop", method)
    written = set(_stored(loop)) - {routed.accumulator}
    if written & {routed.hidden_states, routed.top_k_index, routed.top_k_weights}:
        raise Unreadable("a loop that leaves hidden states and routing as they are", loop)
    for statement in method.body[born + 1 : position]:
        if reads_name(statement, routed.accumulator):
            raise Unreadable(f"no use of {routed.accumulator} before the loop", statement)
    for statement in method.body[position + 1 :]:
        later = {
            n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        } & written
        if later:
            raise Unreadable(f"no use of the loop's own {', '.join(sorted(later))} after it", statement)


def _superseded(
    body: Sequence[ast.stmt], loop: int, zeros: dict[int, str], positions: dict[int, str]
) -> tuple[int, ...]:
    """The statements that made mask, hit list and accumulator, less those whose result something else reads."""
    gone = dict(positions)
    while True:
        rest = [s for i, s in enumerate(body) if i != loop and i not in gone and i not in zeros]
        needed = {i for i, name in gone.items() if any(reads_name(statement, name) for statement in rest)}
        if not needed:
            return tuple(sorted({*gone, *zeros}))
        gone = {i: name for i, name in gone.items() if i not in needed}


def _counts(info: ClassInfo, attribute: str, num_experts: str) -> set[str]:
    """The expressions that stand for the number of experts: of the list, and the attributes that hold the same."""
    counts = {f"len(self.{attribute})", num_experts}
    own = num_experts.removeprefix("self.")
    if own in info.attributes and own != num_experts:
        counts.add(ast.unparse(info.attributes[own]))
    counts |= {f"self.{name}" for name, value in info.attributes.items() if ast.unparse(value) in counts}
    return counts | {
        f"self.{count}" for count in counts if count.startswith("config.") and "config" in info.attributes
    }


class _Setup:
    """The straight-line statements before the loop: masks, lists of the experts that were hit, accumulators."""

    def __init__(self, body: Sequence[ast.stmt]) -> None:
        self.masks: dict[str, _Mask] = {}
        self.hits: set[str] = set()
        self.zeros: dict[str, tuple[int, str]] = {}  # name -> position, dtype
        self.stored: dict[str, int] = {}  # name -> position of its last assignment
        self.positions: dict[int, str] = {}  # of masks and hits
        for position, statement in enumerate(body):
            self._read(position, statement)

    def _read(self, position: int, statement: ast.stmt) -> None:
        simple = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        value = statement.value if simple and isinstance(statement.targets[0], ast.Name) else None
        mask = self._mask(value, position) if value is not None else None
        is_hits = value is not None and mask is None and self.is_hits(value)
        zeros = self._zeros(value)
        for name in _stored(statement):
            self.stored[name] = position
            self.masks.pop(name, None)
            self.hits.discard(name)
            self.zeros.pop(name, None)
        if value is None:
            return
        name = statement.targets[0].id
        if mask is not None:
            self.masks[name] = mask
            self.positions[position] = name
        elif is_hits:
            self.hits.add(name)
            self.positions[position] = name
        elif zeros is not None:
            self.zeros[name] = (position, zeros)

    def _mask(self, node: ast.expr, position: int) -> _Mask | None:
        if isinstance(node, ast.Name):
            return self.masks.get(node.id)
        if not isinstance(node, ast.Call):
            return None
        if dotted(node.func).endswith("one_hot") and node.args and isinstance(node.args[0], ast.Name):
            return _Mask(node.args[0].id, "tke", position)
        inner = self._mask(node.func.value, position) if isinstance(node.func, ast.Attribute) else None
        if inner is None or node.func.attr != "permute":
            return None
        dims = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if sorted(dims) != [0, 1, 2]:
            return None
        return _Mask(inner.selected, "".join(inner.order[d] for d in dims), inner.line)

    def is_hits(self, node: ast.expr) -> bool:
        """`torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()`, with or without the comparison."""
        while isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Name):
            return node.id in self.hits
        if not (isinstance(node, ast.Call) and dotted(node.func).endswith("nonzero")):
            return False
        inside = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {"torch"}
        constants = {abs(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) is int}
        return bool(inside) and inside <= set(self.masks) and constants <= {0, 1, 2}

    @staticmethod
    def _zeros(node: ast.expr | None) -> str | None:
        """The source of the dtype of `torch.zeros(...)` or `torch.zeros_like(x)`; None for anything else."""
        if not (isinstance(node, ast.Call) and dotted(node.func) in ("torch.zeros", "torch.zeros_like")):
            return None
        given = next((ast.unparse(k.value) for k in node.keywords if k.arg == "dtype"), None)
        if given is None and dotted(node.func) == "torch.zeros_like" and node.args:
            return f"{ast.unparse(node.args[0])}.dtype"
        return given or "torch.get_default_dtype()"


def _stored(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@dataclass(frozen=True)
class _Routed:
    accumulator: str
    hidden_states: str
    top_k_index: str
    top_k_weights: str
    mask_line: int  # -1: the loop reads the selection itself


@dataclass(frozen=True)
class _Term:
    """A value inside the loop: number, expert, mask, token, slot, rows, weights, output, weighted."""

    kind: str
    hidden: str = ""
    weights: str = ""
    mask: _Mask | None = None


class _LoopBody:
    """Executes the body of the loop for one expert."""

    def __init__(self, attribute: str, setup: _Setup, counts: set[str]) -> None:
        self.attribute, self.setup = attribute, setup
        self.counts = counts  # the ways to write the number of experts
        self.values: dict[str, _Term] = {}
        self.mask: _Mask | None = None  # the one that chose the tokens
        self.result: _Routed | None = None

    def read(self, loop: ast.For) -> _Routed:
        self._header(loop)
        if loop.orelse:
            raise Unreadable("a loop without an else", loop)
        self._block(loop.body)
        if self.result is None:
            raise Unreadable("ACC.index_add_(0, tokens, expert(X[tokens]) * W[tokens, slots, None])", loop)
        return self.result

    def _header(self, loop: ast.For) -> None:
        target, source = loop.target, loop.iter
        if isinstance(target, ast.Name) and (self._is_every_expert(source) or self.setup.is_hits(source)):
            self.values[target.id] = _Term("number")
            return
        if isinstance(source, ast.Call) and dotted(source.func) == "enumerate" and isinstance(target, ast.Tuple):
            number, expert = target.elts
            if (
                own_attribute(source.args[0]) == self.attribute
                and isinstance(number, ast.Name)
                and isinstance(expert, ast.Name)
            ):
                self.values |= {number.id: _Term("number"), expert.id: _Term("expert")}
                return
        raise Unreadable(
            "a loop over the experts that were hit, or over all of them",
            f"for {ast.unparse(target)} in {ast.unparse(source)}",
        )

    def _is_every_expert(self, source: ast.expr) -> bool:
        return is_range(source) and ast.unparse(source.args[0]) in self.counts

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for position, statement in enumerate(body):
            if self.result is not None:
                raise Unreadable("nothing after the sum in the loop over experts", statement)
            if isinstance(statement, ast.If) and self._asks_for_tokens(statement.test) and not statement.orelse:
                if len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue):
                    continue
                if position == len(body) - 1:
                    self._block(statement.body)
                    continue
            if not (self._assign(statement) or self._sum(statement)):
                raise Unreadable("a statement of the usual loop over experts", statement)

    def _asks_for_tokens(self, test: ast.expr) -> bool:
        """Whether the condition is only about there being tokens: reads their indices, compares with 0 if at all."""
        names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)} - {"torch"}
        known = {name for name, term in self.values.items() if term.kind in ("token", "slot", "mask")}
        return (
            bool(names) and names <= known and all(n.value == 0 for n in ast.walk(test) if isinstance(n, ast.Constant))
        )

    def _assign(self, statement: ast.stmt) -> bool:
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            return False
        target = statement.targets[0]
        if isinstance(target, ast.Tuple):
            return self._indices(target, statement.value)
        term = self._value(statement.value)
        if term is None or not isinstance(target, ast.Name):
            return self._accumulated(target, statement.value)
        self.values[target.id] = term
        return True

    def _indices(self, target: ast.Tuple, value: ast.expr) -> bool:
        """`slot, token = torch.where(mask[e])`, in the order of the mask's dimensions."""
        if not (isinstance(value, ast.Call) and dotted(value.func) in ("torch.where", "torch.nonzero") and value.args):
            return False
        if dotted(value.func) == "torch.nonzero" and not any(k.arg == "as_tuple" for k in value.keywords):
            return False
        term = self._value(value.args[0])
        if term is None or term.kind != "mask" or len(target.elts) != 2 or self.mask is not None:
            return False
        self.mask = term.mask
        for name, dimension in zip(target.elts, term.mask.order.replace("e", ""), strict=True):
            if not isinstance(name, ast.Name):
                return False
            self.values[name.id] = _Term("token" if dimension == "t" else "slot")
        return True

    def _sum(self, statement: ast.stmt) -> bool:
        """`ACC.index_add_(0, token, weighted)` or `ACC[token] += weighted`."""
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if isinstance(call.func, ast.Attribute) and call.func.attr == "index_add_" and len(call.args) == 3:
                return self._add(call.func.value, call.args)
        if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            target = statement.target
            if isinstance(target, ast.Subscript):
                return self._add(target.value, (ast.Constant(0), target.slice, statement.value))
        return False

    def _accumulated(self, target: ast.expr, value: ast.expr) -> bool:
        """`ACC = ACC.index_add(0, token, weighted)`."""
        if not (
            isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(target, ast.Name)
        ):
            return False
        same = isinstance(value.func.value, ast.Name) and value.func.value.id == target.id
        return same and value.func.attr in ("index_add", "index_add_") and self._add(target, value.args)

    def _add(self, accumulator: ast.expr, args: Sequence[ast.expr]) -> bool:
        if len(args) != 3 or not isinstance(accumulator, ast.Name) or self.mask is None:
            return False
        dim, token, weighted = args
        term = self._value(weighted)
        is_first = isinstance(dim, ast.Constant) and dim.value == 0
        if not is_first or self._kind(token) != "token" or term is None or term.kind != "weighted":
            return False
        self.result = _Routed(accumulator.id, term.hidden, self.mask.selected, term.weights, self.mask.line)
        return True

    def _kind(self, node: ast.expr) -> str | None:
        term = self._value(node)
        return term.kind if term else None

    def _value(self, node: ast.expr) -> _Term | None:
        if isinstance(node, ast.Name):
            return self.values.get(node.id)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            terms = {term.kind: term for term in map(self._value, (node.left, node.right)) if term}
            if terms.keys() == {"output", "weights"}:
                return _Term("weighted", terms["output"].hidden, terms["weights"].weights)
        if isinstance(node, ast.Call):
            return self._call(node)
        return None

    def _subscript(self, node: ast.Subscript) -> _Term | None:
        elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        kinds = ["None" if isinstance(e, ast.Constant) and e.value is None else self._kind(e) for e in elements]
        if own_attribute(node.value) == self.attribute:
            return _Term("expert") if kinds == ["number"] else None
        if not isinstance(node.value, ast.Name):
            return None
        name = node.value.id
        if name in self.values:
            is_first = isinstance(node.slice, ast.Constant) and node.slice.value == 0
            return self.values[name] if self.values[name].kind == "number" and is_first else None
        if name in self.setup.masks:
            mask = self.setup.masks[name]
            return _Term("mask", mask=mask) if kinds == ["number"] and mask.order.startswith("e") else None
        if kinds in (["token"], ["None", "token"]):
            return _Term("rows", hidden=name)
        if kinds in (["token", "slot"], ["token", "slot", "None"]):
            return _Term("weights", weights=name)
        return None

    def _comparison(self, node: ast.Compare) -> _Term | None:
        """`selected == e`: the mask of one expert without a one-hot."""
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq) or not isinstance(node.left, ast.Name):
            return None
        if node.left.id in self.values or self._kind(node.comparators[0]) != "number":
            return None
        return _Term("mask", mask=_Mask(node.left.id, "tk", -1))

    def _call(self, node: ast.Call) -> _Term | None:
        callee = self._value(node.func)
        if callee is not None and callee.kind == "expert":
            rows = self._value(node.args[0]) if len(node.args) == 1 and not node.keywords else None
            return _Term("output", rows.hidden) if rows is not None and rows.kind == "rows" else None
        if dotted(node.func) == "int" and len(node.args) == 1:
            return self._value(node.args[0]) if self._kind(node.args[0]) == "number" else None
        if not isinstance(node.func, ast.Attribute):
            return None
        inner = self._value(node.func.value)
        reshaping = {
            "number": ("item",),
            "mask": ("squeeze",),
            "rows": ("reshape", "view", "contiguous", "squeeze"),
            "weights": ("unsqueeze", "reshape", "view"),
            "weighted": ("to", "type", "type_as"),  # to the accumulator's dtype, which index_add_ demands anyway
        }
        return inner if inner is not None and node.func.attr in reshaping.get(inner.kind, ()) else None
