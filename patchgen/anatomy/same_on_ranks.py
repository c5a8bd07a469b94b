"""Which expressions of a function have one value on all ranks, whatever tokens each of them has.

It is asked of what runs experts; `loss_terms` asks of what is added to a loss, where a rank may have no labels. Known to be the
same are constants, numbers and modules of `self`, the config, flags of the forward (`state_changes.flags`), whether something is
None, what kind of tensor or object something is, and what is computed from these alone:

    self.training and self.config.num_experts > 1      the same
    for i, layer in enumerate(self.layers)             the same number of steps
    mask.sum() > 0, True in mask, rows.numel()         not: they depend on this rank's tokens
    hidden_states.shape[1] > 1                         not: ranks may have sequences of different lengths
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from patchgen.anatomy.classes import (
    LISTS,
    FunctionNode,
    all_arguments,
    base_name,
    own_attribute,
    parameters,
    stored,
    stores_of,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.known import is_left_by_init, is_left_in_config, is_made_of_numbers, is_number
from patchgen.anatomy.names import CONFIG, local_names
from patchgen.anatomy.sequence_loops import changes
from patchgen.anatomy.state_changes import BODIES, in_order, value_pairs

# Builtins whose result is the same on all ranks if their arguments are.
BUILTINS = frozenset(
    f"builtins.{name}"
    for name in (
        *("len", "range", "enumerate", "zip", "reversed", "iter", "list", "tuple", "set", "sorted", "getattr"),
        *("min", "max", "sum", "any", "all", "abs", "round", "int", "float", "bool", "str"),
    )
)
GETATTR = "builtins.getattr"
GIVES_NONE = (GETATTR, "builtins.min", "builtins.max")  # among others
TAKES = ("pop", "popitem", "popleft", "setdefault")  # give what they take out of or put into what they are called on
LOOKS_UP = ("get", *TAKES)  # may give None
ENDS = (ast.Break, ast.Continue)
ABOUT_KINDS = ("builtins.isinstance", "builtins.hasattr", "builtins.callable", "builtins.type")
KINDS = ("ndim", "dtype", "device", "is_cuda")  # what a tensor is, whatever its sizes and values
LIBRARIES = ("torch.", "transformers.")  # their functions `is_grad_enabled()`, `is_compiling()` ask about the process


@dataclass(frozen=True)
class Known:
    """What is known of a function's arguments: which are the same on all ranks, and which may be None on some alone."""

    same: frozenset[str] = frozenset()
    uncertain: frozenset[str] = frozenset()


class SameOnRanks:
    """Reads the expressions of one function, which code of the class `owner` runs."""

    def __init__(self, anatomy: Anatomy, owner: str, function: FunctionNode, known: Known) -> None:
        self._anatomy, self._owner, self._names = anatomy, owner, anatomy.names
        self._local, self._known = local_names(function), known
        inner = {arg.arg for arg in walk(function) if isinstance(arg, ast.arg)}  # of local functions, too
        self._different = (inner | parameters(function)) - {"self", *known.same, CONFIG}
        self._uncertain = {*known.uncertain}  # names that may be None on some ranks alone
        bindings, before = list(_bindings(anatomy, function)), -1
        while before < len(self._different) + len(self._uncertain):
            before = len(self._different) + len(self._uncertain)
            for name, value, conditions in bindings:
                is_chosen = not all(map(self.contains, conditions))
                if is_chosen or value is None or not self.contains(value):
                    self._different.add(name)
                if is_chosen or value is None or not self.is_none_alike(value):
                    self._uncertain.add(name)

    def contains(self, node: ast.AST | None) -> bool:
        """Whether an expression, or a part of one, is the same on all ranks."""
        match node:
            case None | ast.Constant():
                return True
            case ast.Name(name):
                return name not in self._different and (name in self._local or self._names.resolve(node) is not None)
            case ast.Compare(value, [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
                return self.is_none_alike(value)
            case ast.Attribute(value, name):
                if attribute := own_attribute(node):
                    return attribute == "training" or self._is_number_or_module(attribute)
                is_kind = name in KINDS and self.is_none_alike(value)
                return is_kind or self._names.resolve(node) is not None or self._is_of_config(value, node)
            case ast.Call():
                return self._contains_call(node)
            case ast.NamedExpr(_, value):
                return self.contains(value)
            case ast.Lambda() | ast.Await() | ast.Yield() | ast.YieldFrom():
                return False
        return all(map(self.contains, ast.iter_child_nodes(node)))

    def is_none_alike(self, value: ast.expr) -> bool:
        """Whether a value is None on all ranks or on none."""
        match value:
            case ast.Name(name):
                return name not in self._uncertain
            case ast.IfExp(test, body, orelse):
                return self.contains(test) and self.is_none_alike(body) and self.is_none_alike(orelse)
            case ast.BoolOp(_, parts):
                return all(map(self.contains, parts))
            case ast.NamedExpr(_, inner):
                return self.is_none_alike(inner)
            case ast.Attribute(holder):
                attribute = own_attribute(value)
                return is_left_by_init(self._anatomy, self._owner, attribute) if attribute else self.contains(holder)
            case ast.Subscript(holder):
                return self.contains(holder)
            case ast.Call():
                return self._gives_a_value(value) or self.contains(value)
            case ast.Await() | ast.Yield() | ast.YieldFrom():
                return False
        return True  # a tuple, a number, a function

    def _gives_a_value(self, call: ast.Call) -> bool:
        """Whether a call never gives None: of torch, of a builtin, or a method of a tensor, rather than of a module."""
        meaning = self._names.resolve(call.func, self._local) or ""
        match call.func:
            case ast.Attribute(holder, method) if not meaning:
                return base_name(holder) not in ("", "self", "super") and method not in LOOKS_UP
        # `checkpoint(self.pick, x)` of torch.utils gives what the function gives.
        of_torch = meaning.startswith("torch.") and not meaning.startswith("torch.utils.")
        return of_torch or (meaning in BUILTINS and meaning not in GIVES_NONE)

    def _is_of_config(self, holder: ast.expr, node: ast.Attribute) -> bool:
        """Whether an attribute is one of the config, or of what `self` has from it: `self.text_config.num_layers`."""
        attribute = own_attribute(holder)
        is_held = attribute is not None and is_number(self._anatomy, self._owner, attribute)
        is_held = is_held and is_left_by_init(self._anatomy, self._owner, attribute or "")
        is_kept = is_held and not self._anatomy.is_stored_outside(node.attr, [CONFIG])
        return is_kept or is_left_in_config(self._anatomy, node)

    def _is_number_or_module(self, attribute: str) -> bool:
        def is_same(value: ast.AST) -> bool:
            match value:
                case ast.Compare(left, _, others):
                    return all(map(is_same, (left, *others)))
                case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts) | ast.BoolOp(_, parts):
                    return all(map(is_same, parts))
                case ast.Call(function, args) if self._names.resolve(function) in (*BUILTINS, *ABOUT_KINDS[:1]):
                    return all(map(is_same, args)) or is_made_of_numbers(value, self._anatomy, self._owner)
                case ast.Call(function) if self._names.here(function) in self._anatomy.classes:
                    return True
                case ast.Call(function) if self._names.resolve(function) in LISTS:
                    return True
            return is_made_of_numbers(value, self._anatomy, self._owner)

        held = self._anatomy.held(self._owner, attribute)
        is_kept = is_left_by_init(self._anatomy, self._owner, attribute)
        return is_kept and all(map(is_same, held))

    def _contains_call(self, call: ast.Call) -> bool:
        meaning = self._names.resolve(call.func, self._local) or ""
        if ast.unparse(call) in self._known.same:
            return True
        match call.args:
            case [of, *_] if meaning in ABOUT_KINDS:
                return self.is_none_alike(of)
            case [ast.Name("self"), ast.Constant(str(name)), *_] if meaning == GETATTR and self._is_stored(name):
                return self.contains(ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load()))
        is_same = all(map(self.contains, all_arguments(call)))
        match call.func:
            case _ if meaning:
                is_asking = meaning.startswith(LIBRARIES) and meaning.rpartition(".")[2].startswith("is_")
                return is_same and (meaning in BUILTINS or is_asking)
            case ast.Attribute(value, method) if own_attribute(call.func) is None:
                is_kind = method == "dim" and self.is_none_alike(value)
                return is_same and (is_kind or (self.contains(value) and not self._is_module(value)))
        return False

    def _is_stored(self, attribute: str) -> bool:
        family = self._anatomy.family(self._owner)
        stores = any(list(stores_of(info, attribute)) for info in family)
        return stores or self._anatomy.is_stored_outside(attribute, [info.name for info in family])

    def _is_module(self, value: ast.AST) -> bool:
        """Whether it is a module of `self`, whose methods may ask what its forward has kept."""
        attribute = own_attribute(value)
        held = self._anatomy.held(self._owner, attribute) if attribute else ()
        return any(isinstance(one, ast.Call) and self._names.here(one.func) in self._anatomy.classes for one in held)


def _bindings(anatomy: Anatomy, function: FunctionNode) -> Iterator[tuple[str, ast.expr | None, tuple[ast.AST, ...]]]:
    """(name, value, conditions) for each time a function binds or changes a name: the tests and iterables around, those that
    choose within the statement, and those by which the loop around may end. No value where that is not told by an assignment or
    loop, and where an exception may keep a rank from it."""
    ends = _conditions_of_ends(function)
    tried = {inner for node in walk(function) if isinstance(node, ast.Try) and node.handlers for inner in walk(node)}
    for statement, around in in_order(function.body):
        own = [part for part in ast.iter_child_nodes(statement) if not isinstance(part, BODIES)]
        nodes = [statement, *(inner for part in own for inner in walk(part))]
        outside = (*around, *ends.get(statement, ()))
        inside = (*outside, *(condition for node in nodes for condition in _choices(node)))
        for node in nodes:
            conditions = inside if isinstance(node, ast.NamedExpr) else outside
            for names, value in _assigned(node):
                yield from ((name, None if statement in tried else value, conditions) for name in names)
            for place, values in _changed(anatomy, node):
                yield base_name(place), None if statement in tried else ast.Tuple(values, ast.Load()), inside


def _assigned(node: ast.AST) -> Iterator[tuple[set[str], ast.expr | None]]:
    """The names that a node binds, and the value."""
    for target, value in [(node.target, node.iter)] if isinstance(node, ast.comprehension) else value_pairs(node):
        is_element = isinstance(node, ast.For | ast.comprehension)
        if isinstance(node, ast.Assign):  # of a tuple that is not written out
            is_element = value is node.value and target not in node.targets
        names = {*stored(target), base_name(target)} - {"", "self"}
        yield names, ast.Subscript(value, ast.Constant(0), ast.Load()) if is_element else value
    match node:
        case ast.withitem(_, ast.expr() as bound):
            yield set(stored(bound)), None
        case ast.ExceptHandler(_, str(name)) | ast.MatchAs(_, str(name)) | ast.MatchStar(str(name)):
            yield {name}, None


def _changed(anatomy: Anatomy, node: ast.AST) -> Iterator[tuple[ast.expr, list[ast.expr]]]:
    """What a node changes in place, of names but `self`, and by which values: `rows.append(row)`."""
    changed: list[tuple[ast.expr, list[ast.expr]]] = [(place, values) for place, values, _ in changes(anatomy, node)]
    match node:
        case ast.Call(ast.Attribute(holder, method), args) if method in TAKES:
            changed.append((holder, args))
        case ast.Delete(places):
            changed += [(place, [place.slice]) for place in places if isinstance(place, ast.Subscript)]
        case ast.Expr(ast.Call(function) as call) if (anatomy.names.resolve(function) or ".").startswith("."):
            values = all_arguments(call)  # `self.count(stats, rows)`, whose result nothing takes
            changed += [(value, values) for value in values]
    return ((place, values) for place, values in changed if base_name(place) not in ("", "self"))


def _choices(node: ast.AST) -> list[ast.expr]:
    """The conditions by which a part of an expression may not be computed, or is computed several times."""
    match node:
        case ast.IfExp(test):
            return [test]
        case ast.BoolOp(_, [*tests, _]):
            return tests
        case ast.comprehension(_, iterable, tests):
            return [iterable, *tests]
    return []


def _conditions_of_ends(function: FunctionNode) -> dict[ast.AST, list[ast.AST]]:
    """Statement of a loop -> the conditions of the `break` and `continue` in it."""
    found: dict[ast.AST, list[ast.AST]] = {}
    for loop in walk(function):
        if isinstance(loop, ast.For | ast.AsyncFor | ast.While):
            ends = [part for node, tests in in_order(loop.body) if isinstance(node, ENDS) for part in tests]
            for node in walk(loop) if ends else ():
                found.setdefault(node, []).extend(ends)
    return found
