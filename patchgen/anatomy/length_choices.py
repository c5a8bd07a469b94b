"""Code that chooses by how long a sequence is: a test or a bound of a tensor's size, and the largest position.

On a slice of a sequence it chooses otherwise than on the whole one. Decoding is not a choice (`length > 1`), nor are a check
that raises, the comparison of two sizes, a bound of an index by a size, and the `k` of a `topk`, which is at most what there is.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from patchgen.anatomy.classes import (
    FunctionNode,
    all_arguments,
    arguments,
    calls,
    defaults_of,
    dotted,
    parameter_names,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.known import POINTWISE
from patchgen.anatomy.names import is_of_config, local_names
from patchgen.anatomy.positions import POSITIONS
from patchgen.anatomy.state_changes import value_pairs
from patchgen.anatomy.training_path import statements_with_reasons

UNORDERED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
BOUNDS = ("min", "max", "clamp", "clip", "minimum", "maximum")
LARGEST = ("max", "amax")
COMPUTES = ("builtins.int", "builtins.float", "builtins.bool", "builtins.min", "builtins.max", "builtins.round")
CACHES = ("past_key_values", "cache")  # transformers' parameter of models and layers for a cache, by release
BY_ROW_LENGTH = "dynamic_rope_update"  # transformers': its frequencies are those of the largest position
WRAPS = ("tensor", "as_tensor", "new_tensor", "full", "new_full")  # a tensor of a number


class ChosenByLength:
    """Reads one function; `found` are its expressions that choose by a length, in order."""

    def __init__(self, anatomy: Anatomy, function: FunctionNode) -> None:
        self._anatomy, self._function, self._local = anatomy, function, local_names(function)
        self._pairs = [pair for node in walk(function) for pair in value_pairs(node)]
        names = [node for node in walk(function) if isinstance(node, ast.Name)]
        self._reads = [node for node in names if isinstance(node.ctx, ast.Load)]
        self._sizes, self._numbers, self._positions = set[str](), set[str](), {POSITIONS} & self._local
        before = -1
        while before < (before := len(self._sizes) + len(self._positions)):
            for target, value in self._pairs:
                names = {target.id} if isinstance(target, ast.Name) else set[str]()
                self._sizes |= names if self._is_size(value) else set()
                self._positions |= names if self._is_of_positions(value) else set()
        before = -1
        while before < (before := len(self._numbers)):
            self._numbers |= {name for name in self._local if self._is_plain_name(name)}

    @property
    def found(self) -> Iterator[ast.expr]:
        left_out, of_rows = self._outside_training() | self._counts_of_topk(), self._lengths_of_rows()
        for part, why in statements_with_reasons(self._function, ""):
            for node in () if why or isinstance(part, ast.Assert | ast.Raise) else walk(part):
                is_choice = self._compares(node) or self._bounds(node)
                is_choice |= self._is_largest(node) and node not in of_rows
                if isinstance(node, ast.expr) and is_choice and node not in left_out:
                    yield node

    def _outside_training(self) -> set[ast.AST]:
        """The code of branches that training does not take, with a cache or in eval mode, and the tests of checks that raise."""
        found = set[ast.AST]()
        caches = {*CACHES} & {*parameter_names(self._function)}
        outside = {"not self.training", *(f"{name} is not None" for name in caches)}
        inside = {"self.training", *(f"{name} is None" for name in caches)}
        for branch in walk(self._function):
            if not isinstance(branch, ast.If | ast.IfExp):
                continue
            body, orelse = ([part] if isinstance(part, ast.expr) else part for part in (branch.body, branch.orelse))
            joined = branch.test.values if isinstance(branch.test, ast.BoolOp) else [branch.test]
            is_left = not isinstance(getattr(branch.test, "op", None), ast.Or)
            if is_left and outside & set(map(ast.unparse, joined)):
                found |= {node for part in (branch.test, *body) for node in walk(part)}
            if ast.unparse(branch.test) in inside:
                found |= {node for part in orelse for node in walk(part)}
            if not orelse and all(isinstance(statement, ast.Raise) for statement in body):
                found |= {*walk(branch.test)}
        return found

    def _lengths_of_rows(self) -> set[ast.AST]:
        """The largest positions that a rotary embedding reads for types whose frequencies depend on them alone: the runtime hands
        these the whole row's (runtime/parallel/row_lengths.py)."""
        if not any(self._anatomy.names.is_upstream(node, BY_ROW_LENGTH) for node in self._function.decorator_list):
            return set()
        branches = [node for node in walk(self._function) if isinstance(node, ast.If)]
        typed = [node for node in branches if any(map(_is_of_special_type, _operands(node.test)))]
        inside = {node for branch in typed for part in (branch.test, *branch.body) for node in walk(part)}
        elsewhere = {node.id for node in self._reads if node not in inside}
        values = [v for target, v in self._pairs if isinstance(target, ast.Name) and target.id not in elsewhere]
        return inside | {node for value in values for node in walk(value)}

    def _compares(self, node: ast.AST) -> bool:
        """Whether a node compares sizes with numbers."""
        match node:
            case ast.Compare(left, orders, others) if not any(isinstance(order, UNORDERED) for order in orders):
                values = [left, *others]
                return self._are_sizes_and_numbers(values, few=any(map(self._is_rest, values)))
        return False

    def _are_sizes_and_numbers(self, values: Sequence[ast.expr], *, few: bool = False) -> bool:
        """Whether some are sizes and the others numbers; `few`: also 0 and 1."""
        others = [value for value in values if not self._is_size(value)]
        return 0 < len(others) < len(values) and all(
            self._is_plain(one) and (few or not _is_few(one)) for one in others
        )

    def _is_rest(self, size: ast.expr) -> bool:
        """Whether a size is what is beyond a number: `S - window`."""
        match size:
            case ast.Name(name):
                return any(self._is_rest(v) for t, v in self._pairs if isinstance(t, ast.Name) and t.id == name)
            case ast.BinOp(left, ast.Sub(), right):
                return self._is_plain(left) or self._is_plain(right)
        return False

    def _bounds(self, node: ast.AST) -> bool:
        """Whether a node bounds a size, `min(x.shape[1], 10)`, rather than an index by a size."""
        if not isinstance(node, ast.Call):
            return False
        values = all_arguments(node)
        if self._meaning(node.func) in ("builtins.min", "builtins.max"):
            return self._are_sizes_and_numbers(values)
        if self._anatomy.names.operation(node).removesuffix("_") not in BOUNDS:
            return False
        is_method = isinstance(node.func, ast.Attribute) and not self._meaning(node.func)
        bounded = node.func.value if is_method and isinstance(node.func, ast.Attribute) else next(iter(values), node)
        limits = values if is_method else values[1:]
        return bool(limits) and self._is_size(bounded) and not all(map(_is_few, limits))

    def _is_largest(self, node: ast.AST) -> bool:
        """Whether a node is the largest position."""
        match node:
            case ast.Call(ast.Attribute(value, name) as called) if name in LARGEST and not self._meaning(called):
                return self._is_of_positions(value)
            case ast.Call(called, [value, *_]) if (self._meaning(called) or "") in ("torch.max", "torch.amax"):
                return self._is_of_positions(value)
        return False

    def _is_size(self, value: ast.AST) -> bool:
        """Whether a value is a size of a tensor other than a weight's, or a number computed from one."""
        match value:
            case ast.Name(name):
                return name in self._sizes
            case ast.Attribute(of, "shape") | ast.Call(ast.Attribute(of, "size" | "numel")):
                return not dotted(of).startswith("self.") or any(calls(of))
            case ast.Subscript(of) | ast.UnaryOp(_, of) | ast.Starred(of):
                return self._is_size(of)
            case ast.BinOp(left, _, right) | ast.IfExp(_, left, right):
                return self._is_size(left) or self._is_size(right)
            case ast.Tuple(elements) | ast.List(elements):
                return any(map(self._is_size, elements))
            case ast.Call(called, values):
                meaning = self._meaning(called) or ""
                is_number = meaning in COMPUTES or meaning.startswith("math.")
                is_wrapped = self._anatomy.names.operation(value) in WRAPS
                return (is_number or is_wrapped) and any(map(self._is_size, values[-1:] if is_wrapped else values))
        return False

    def _is_of_positions(self, value: ast.AST) -> bool:
        """Whether a value is positions, or computed from them element by element."""
        match value:
            case ast.Name(name):
                return name in self._positions
            case ast.Subscript(of) | ast.UnaryOp(_, of):
                return self._is_of_positions(of)
            case ast.BinOp(left, _, right):
                return self._is_of_positions(left) or self._is_of_positions(right)
            case ast.Call(ast.Attribute(of, name) as called) if not self._meaning(called):
                return name in POINTWISE and self._is_of_positions(of)
        return False

    def _is_plain(self, value: ast.AST) -> bool:
        """Whether a value is a number that no data decides: a constant, of the config or the module, or of a parameter that is
        annotated or has a default as one."""
        match value:
            case ast.Constant(number):
                return isinstance(number, int | float)
            case ast.Name(name):
                return name in self._numbers or (name not in self._local and name in self._anatomy.tables)
            case ast.Attribute(ast.Name("self")):
                return True
            case ast.BinOp(left, _, right):
                return self._is_plain(left) and self._is_plain(right)
            case ast.UnaryOp(_, of):
                return self._is_plain(of)
            case ast.Call(called, values) if self._meaning(called) in (*COMPUTES, "builtins.getattr"):
                return all(isinstance(v, ast.Constant) or is_of_config(v) or self._is_plain(v) for v in values)
        return is_of_config(value)

    def _is_plain_name(self, name: str) -> bool:
        values = [value for target, value in self._pairs if isinstance(target, ast.Name) and target.id == name]
        if name in parameter_names(self._function):
            kinds = [
                arg.annotation for arg in walk(self._function.args) if isinstance(arg, ast.arg) and arg.arg == name
            ]
            default = defaults_of(self._function).get(name)
            is_number = any(kind is not None and ast.unparse(kind) in ("int", "float") for kind in kinds)
            return not values and (is_number or (default is not None and self._is_plain(default)))
        return bool(values) and name not in self._sizes and all(map(self._is_plain, values))

    def _counts_of_topk(self) -> set[ast.AST]:
        """The expressions that are how many `topk` selects, directly or by a name that is read for nothing else."""
        found = set[ast.AST]()
        selecting = [call for call in calls(self._function) if self._anatomy.names.operation(call) == "topk"]
        for call in selecting:
            is_function = bool(self._meaning(call.func))
            found |= {arguments(call, ("input", "k") if is_function else ("k",)).get("k", call)}
        names = {node.id for node in self._reads if node in found}
        only = {name for name in names if all(node in found for node in self._reads if node.id == name)}
        return found | {value for target, value in self._pairs if isinstance(target, ast.Name) and target.id in only}

    def _meaning(self, called: ast.AST) -> str | None:
        return self._anatomy.names.resolve(called, self._local)


def _operands(test: ast.expr) -> Sequence[ast.expr]:
    """The conditions that a test joins by `and`, `or` and `not`."""
    match test:
        case ast.BoolOp(_, values):
            return [one for value in values for one in _operands(value)]
        case ast.UnaryOp(ast.Not(), value):
            return _operands(value)
    return [test]


def _is_of_special_type(test: ast.expr) -> bool:
    """Whether a condition is that the type of a rotary embedding is not the default."""
    match test:
        case ast.Compare(_, [ast.NotEq()], [ast.Constant("default")]):
            return True
    return False


def _is_few(value: ast.AST) -> bool:
    """Whether a value is 0 or 1: whether there is anything, or more than the one token of decoding."""
    return isinstance(value, ast.Constant) and value.value in (0, 1)
