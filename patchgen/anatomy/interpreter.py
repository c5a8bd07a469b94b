"""Runs straight-line tensor code symbolically: each name holds a term of a small set of operations.

A term is a tuple of the operation and its operands. Code that is not understood raises `Missed`: a guess would be a wrong
model. Names are resolved (`names`), arguments are bound as Python binds them, functions and methods of the file are run
inline.

    value     name[, version]                   a tensor from elsewhere; the version tells values of one name apart
    chosen    selection, order                  where `selection [T, K]` is this expert; order: the axes, `t` tokens and
                                                `k` slots, or `r` for rows of `[T * K]`
    tokens, slots  selection                    the indices where it is this expert
    rows, routing  tensor, selection            `tensor[tokens]`, `tensor[tokens, slots, None]`
    linear    x, weight, bias, transposed       one expert's projection
    half      x, 0 or 1                         the first or second half of the last dimension
    call      attribute, x                      `self.<attribute>(x)`
    expert    x                                 the output of this expert's module, from a list, for x

For loops that give each expert its rows of all `[T * K]` and add up the K outputs of a token at the end:

    flat, order, counts  selection              its values in one row; their order by expert; how many each expert has
    repeated, sorted     x, ...                 `[T * K]` rows: each token K times; sorted by expert
    outputs, placed      x, selection           the experts' outputs: sorted by expert; in the order of the selection
    combined             x, selection, weights  the K outputs of a token, each times its weight, added up
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from patchgen.anatomy.classes import FunctionNode, all_arguments, arguments, own_attribute, parameter_names, stored
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.anatomy.operations import FUNCTIONS, METHODS, OPERATORS, Term, bound, operation
from patchgen.errors import Missed

MAX_DEPTH = 4  # of functions run inline


@dataclass(frozen=True)
class ExpertCall:
    """How the modules of a list are called: the parameters of their forward, the rows first, and the one that scales the output."""

    parameters: tuple[str, ...] = ("x",)
    scale: str = ""


class Interpreter:
    """Runs the code of one function.

    Args:
        owner: the class of `self`.
        function: whose scope the code is; its parameters hold `values`.
        counts: the expressions for the number of experts, as source.
        experts: the attribute that holds a list of expert modules, if there is one.
        called: how these are called.
        constants: attribute -> the number that it holds in the code that is read.
        depth: how many functions this one is run inline in.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        owner: str,
        function: FunctionNode,
        values: dict[str, Term],
        counts: frozenset[str] = frozenset(),
        experts: str = "",
        called: ExpertCall = ExpertCall(),
        constants: dict[str, Term] | None = None,
        depth: int = 0,
    ) -> None:
        self._anatomy, self._owner, self._counts, self._experts = anatomy, owner, counts, experts
        self._called, self._constants = called, constants or {}
        self._local, self._depth = local_names(function), depth
        self.values = dict(values)
        self.sum: tuple[str, Term] | None = None  # the name that a loop adds to, and the term added
        self._loop_selection: Term | None = None  # the selection that the loop is about

    def run(self, body: Sequence[ast.stmt]) -> Term | None:
        """Runs statements and returns the term that they return, or None."""
        for position, statement in enumerate(body):
            if isinstance(statement, ast.Return) and statement.value is not None:
                if position < len(body) - 1:
                    raise Missed("no code below a return", statement)
                return self.value(statement.value)
            self.statement(statement, is_last=position == len(body) - 1)
        return None

    def statement(self, statement: ast.stmt, *, is_last: bool = False) -> None:
        """Runs one statement; `is_last` if none follows it in its block. Raises `Missed` if it is not understood."""
        if self.sum is not None and not self._is_next_start(statement):
            raise Missed("nothing below the sum in the loop over experts", statement)
        if isinstance(statement, ast.With):
            self._without_gradient(statement)
        elif isinstance(statement, ast.If):
            self._guard(statement, is_last)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            if not isinstance(statement.target, ast.Subscript):
                raise Missed("no change of a value in place", statement)
            self._add(statement.target.value, self.value(statement.target.slice), statement.value, statement)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            if not self._read_placement(statement.targets[0], statement.value):
                self._assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, statement.value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            if not (self._read_sum(statement.value) or self._read_change(statement.value)):
                raise Missed("plain assignments from one value to the next, then one index_add_", statement)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            raise Missed("plain assignments from one value to the next", statement)

    def _without_gradient(self, statement: ast.With) -> None:
        """`with torch.no_grad():` around indices and masks, which have no gradient."""
        manager = statement.items[0].context_expr
        function = manager.func if isinstance(manager, ast.Call) and not manager.args else manager
        before = dict(self.values)
        if len(statement.items) > 1 or self._resolve(function) != "torch.no_grad":
            raise Missed("no context but torch.no_grad()", statement)
        for inner in statement.body:
            self.statement(inner)
        changed = [term for name, term in self.values.items() if before.get(name) != term]
        indices = ("mask", "hits", "count_of", "hit", "chosen", "tokens", "slots")
        if self.sum or any(term[0] not in indices for term in changed):
            raise Missed("nothing that has a gradient under torch.no_grad()", statement)

    def _guard(self, statement: ast.If, is_last: bool) -> None:
        """An `if` on a constant, or one that skips an expert without tokens: by `continue`, or around the rest of the block."""
        test = self.value(statement.test)
        if test[0] == "const":
            for inner in statement.body if test[1] else statement.orelse:
                self.statement(inner)
            return
        skips = len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue)
        is_known = test in (("nobody",), ("empty",)) if skips else is_last and test == ("occupied",)
        if statement.orelse or not is_known:
            raise Missed("a condition that only leaves out experts without tokens", statement)
        for inner in statement.body if not skips else ():
            self.statement(inner)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and isinstance(value, ast.Call) and self._read_sum(value, target.id):
            return
        term = self.value(value)
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        terms = term[1] if isinstance(target, ast.Tuple) and term[0] == "tuple" else (term,)
        assigned = {name.id: part for name, part in zip(names, terms, strict=False) if isinstance(name, ast.Name)}
        if not len(assigned) == len(names) == len(terms) or "self" in assigned:
            raise Missed("a value on the way, by a name of its own", target)
        self.values |= assigned

    def _read_sum(self, call: ast.Call, target: str = "") -> bool:
        """Takes in `ACC.index_add_(0, tokens, weighted)`, or `ACC = ACC.index_add(...)`; False for any other call."""
        function = call.func
        if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
            return False
        if target not in ("", function.value.id) or function.attr not in ("index_add_", *["index_add"] * bool(target)):
            return False
        given = {keyword.arg or "**": keyword.value for keyword in call.keywords}
        dim, index, source = bound("index_add", call.args, given, call)
        if self.value(dim) != ("const", 0):
            raise Missed("<zeros>.index_add_(0, <rows>, <weighted output>)", call)
        self._add(function.value, self.value(index), source, call)
        return True

    def _add(self, accumulator: ast.expr, index: Term, source: ast.expr, node: ast.AST) -> None:
        zeros = self.value(accumulator)
        added = self.value(source)
        if added[0] == "cast":  # to the dtype of the sum, which index_add_ demands anyway
            added = added[1]
        if zeros[0] != "zeros" or index[0] != "tokens" or not isinstance(accumulator, ast.Name):
            raise Missed("<zeros>.index_add_(0, <rows>, <weighted output>)", node)
        self.sum = (accumulator.id, added)
        self._require_selection(index[1], node)

    def _read_placement(self, target: ast.expr, value: ast.expr) -> bool:
        """Takes in `Y[flat == e] = expert(X[flat == e])` in a loop over experts, or `Y[order] = <outputs in that order>` below
        it; False for any other target."""
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return False
        name, index, placed_value = target.value.id, self.value(target.slice), self.value(value)
        match self.value(target.value), index, placed_value:
            case ("empty", _), ("chosen", selection, "r"), ("expert", ("rows", ("repeated", x), of)) if (
                selection == of
            ):
                self.sum = (name, ("placed", x, selection))
                self._require_selection(selection, target)
            case ("empty", _), ("order", selection), ("outputs", x, of) if selection == of:
                self.values[name] = ("placed", x, selection)
            case _:
                raise Missed("rows of an empty tensor, set to what this expert makes of the same rows", target)
        return True

    def _read_change(self, call: ast.Call) -> bool:
        """Takes in `T.scatter_(1, selection, 1)`, which marks the experts of each token, or `L.append(expert(rows))`; False for
        any other call."""
        match call:
            case ast.Call(ast.Attribute(ast.Name(name), "scatter_"), [_, _, _]):
                place, selection, mark = map(self.value, call.args)
                if self.values.get(name) == ("table", selection) and place == mark == ("const", 1):
                    self.values[name] = ("marked", selection)
                    return True
            case ast.Call(ast.Attribute(ast.Name(name), "append"), [appended]) if self.values.get(name) == ("list",):
                match self.value(appended):
                    case ("expert", ("piece", x, selection)):
                        self.sum = (name, ("outputs", x, selection))
                        return True
        return False

    def _is_next_start(self, statement: ast.stmt) -> bool:
        """Whether it is `start = end`, which may follow the append."""
        value = statement.value if isinstance(statement, ast.Assign) else None
        return isinstance(value, ast.Name) and self.values.get(value.id, ("",))[0] == "end"

    def _require_selection(self, selection: Term, node: ast.AST) -> None:
        """Raises `Missed` if a loop is about more than one selection."""
        if self._loop_selection not in (None, selection):
            raise Missed("one selection of experts in a loop", node)
        self._loop_selection = selection

    def loop(self, loop: ast.For) -> tuple[str, Term]:
        """Runs the body of a loop over experts for one expert; returns the name that it adds to, and the term that is added."""
        header = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
        target, starts = loop.target, []
        experts: Term = ("number",)
        match loop:
            case ast.For(ast.Tuple([number, ast.Name(module)]), ast.Call(function, [what], [])) if (
                self._resolve(function) == "builtins.enumerate"
            ):
                target = number
                if self._experts and own_attribute(what) == self._experts:
                    self.values[module] = ("module",)
                else:
                    starts = self._enter_counted(loop, module, self.value(what))
            case _:
                experts = self.value(loop.iter)
        if loop.orelse or not isinstance(target, ast.Name) or experts[0] not in ("hits", "range", "number"):
            raise Missed("a loop over the experts that were hit, or over all of them", header)
        if experts[0] == "hits":
            self._require_selection(experts[1], loop)
        inside = {name for statement in loop.body for name in stored(statement)}
        carried = inside & set(self.values) - {target.id}
        self.values[target.id] = ("number",)
        self.run(loop.body)
        carried -= {name for name in starts if self.values[name][0] == "end"}
        if self.sum is None:
            raise Missed("an index_add_ of the weighted expert output", loop)
        if carried - {self.sum[0]}:
            raise Missed(f"a loop that leaves {', '.join(sorted(carried - {self.sum[0]}))} as it is", loop)
        return self.sum

    def _enter_counted(self, loop: ast.For, name: str, counts: Term) -> list[str]:
        """Enters `for e, n in enumerate(<counts>)`; returns the names, 0 above it, that hold where an expert's rows start."""
        if counts[0] != "counts":
            raise Missed("how many rows each expert has", loop.iter)
        starts = [start for start in {*stored(loop)} if self.values.get(start) == ("const", 0)]
        self.values |= dict.fromkeys(starts, ("start", counts[1])) | {name: ("count", counts[1])}
        self._require_selection(counts[1], loop)
        return starts

    def _resolve(self, node: ast.expr) -> str:
        return self._anatomy.names.resolve(node, self._local) or ""

    # ---------------------------------------------------------------------------------------- expressions

    def value(self, node: ast.expr) -> Term:
        """The term of an expression. Raises Missed if it is not understood."""
        if ast.unparse(node) in self._counts:
            return ("experts",)
        match node:
            case ast.Name(name):
                term = self.values.get(name)
            case ast.Constant(constant):
                term = ("const", constant)
            case ast.Tuple(parts):
                term = ("tuple", tuple(map(self.value, parts)))
            case ast.Slice(None, None, None):
                term = ("all",)
            case ast.Slice(ast.expr() as lower, ast.expr() as upper, None):
                term = ("span", self.value(lower), self.value(upper))
            case ast.Starred(inner):
                term = ("all of", self.value(inner))
            case ast.List([]):
                term = ("list",)
            case ast.IfExp(ast.Call(function, [outputs]), concatenated, ast.Call(ast.Attribute(_, "new_empty"))) if (
                self._resolve(function) == "builtins.len" and self.value(outputs)[0] == "outputs"
            ):
                term = self.value(concatenated)  # without any output there are no tokens
            case _:
                reader = getattr(self, f"_{type(node).__name__.lower()}", None)
                term = reader(node) if reader is not None else None
        if term is None:
            raise Missed("a statement of the usual loop over experts", node)
        return term

    def _unaryop(self, node: ast.UnaryOp) -> Term | None:
        operand = self.value(node.operand)
        if isinstance(node.op, ast.USub) and operand[0] == "const":
            return ("const", -operand[1])
        return ("empty",) if isinstance(node.op, ast.Not) and operand == ("occupied",) else None

    def _attribute(self, node: ast.Attribute) -> Term | None:
        if self._resolve(node).startswith("torch."):
            return ("library", self._resolve(node))
        if own_attribute(node):
            return self._constants.get(node.attr, ("self", node.attr))
        owner = self.value(node.value)
        return (node.attr, owner) if node.attr in ("dtype", "device", "shape") else None

    def _subscript(self, node: ast.Subscript) -> Term | None:
        owner, index = self.value(node.value), self.value(node.slice)
        parts = index[1] if index[0] == "tuple" else (index,)
        match owner, *parts:
            case ("self", name), ("number",):
                return ("module",) if name == self._experts else ("weight", name)
            case ("mask", selection, order), ("number",) if order.startswith("e"):
                self._require_selection(selection, node)
                return ("chosen", selection, order[1:])
            case ("number",), ("const", 0):
                return owner
            case ("shape", ("tokens", _)), ("const", 0):
                return ("number of tokens",)
            case ("shape", tensor), ("const", place):
                return ("size", tensor, place)
            case ("repeated", _), ("chosen", selection, "r"):
                return ("rows", owner, selection)
            case ("value", *_), ("sorted tokens", selection):
                return ("sorted", owner, selection)
            case ("sorted", x, selection), ("span", ("start", first), ("end", last)) if first == last == selection:
                return ("piece", x, selection)
            case (("value", *_), ("tokens", selection)) | (("value", *_), ("const", None), ("tokens", selection)):
                return ("rows", owner, selection)
            case ("value", *_), ("tokens", selection), ("slots", of) if selection == of:
                return ("weights", owner, selection)
            case ("value", *_), ("tokens", selection), ("slots", of), ("const", None) if selection == of:
                return ("routing", owner, selection)
            case ("weights", *chosen), ("all",), ("const", None):
                return ("routing", *chosen)
        return None

    def _compare(self, node: ast.Compare) -> Term | None:
        match self.value(node.left), node.ops, self.value(node.comparators[0]):
            case (("number",), [ast.Eq()], ("experts",)) | (("count", _), [ast.Eq()], ("const", 0)):
                return ("nobody",)
            case selection, [ast.Eq()], ("number",) if selection[0] == "value":
                self._require_selection(selection, node)
                return ("chosen", selection, "tk")
            case ("flat", selection), [ast.Eq()], ("number",):
                return ("chosen", selection, "r")
            case ("const", int(left_number)), [ast.Gt()], ("const", int(right_number)):
                return ("const", left_number > right_number)
            case ("count_of", selection), [ast.Gt()], ("const", 0):
                return ("hit", selection)
            case ("number of tokens",), [ast.Eq()], ("const", 0):
                return ("empty",)
            case ("number of tokens",), [ast.Gt()], ("const", 0):
                return ("occupied",)
        return None

    def _binop(self, node: ast.BinOp) -> Term | None:
        name = OPERATORS.get(type(node.op), "")
        return operation(name, self.value(node.left), self.value(node.right))

    def _call(self, node: ast.Call) -> Term | None:
        resolved, attribute = self._resolve(node.func), own_attribute(node.func)
        if function := self._anatomy.names.functions.get(self._anatomy.names.here(node.func, self._local)):
            return self._in_place(function, "", node)
        if attribute:
            return self._own(attribute, node)
        callee = self.values.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if isinstance(node.func, ast.Subscript) or callee is not None:
            return self._expert(node) if self.value(node.func) == ("module",) else None
        operands, name = [self.value(arg) for arg in node.args], FUNCTIONS.get(resolved)
        if not resolved and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            operands, name = [self.value(node.func.value), *operands], node.func.attr
        named = {keyword.arg or "**": self.value(keyword.value) for keyword in node.keywords}
        return operation(name, *bound(name, operands, named, node)) if name else None

    def _expert(self, node: ast.Call) -> Term | None:
        """A call of one expert's module, with what its forward does not read left out."""
        rows, scale = self._called.parameters[0], self._called.scale
        given = arguments(node, self._called.parameters)
        if len(node.args) > len(self._called.parameters) or not {rows, scale} - {""} <= {*given}:
            return None
        output = ("expert", self.value(given[rows]))
        return operation("mul", output, self.value(given[scale])) if scale else output

    def _own(self, attribute: str, node: ast.Call) -> Term | None:
        """`self.<attribute>(...)`: a method is run inline, but with a projection, or half of one, as its argument a plain call."""
        held = self._anatomy.held(self._owner, attribute)
        methods = [value for value in held if isinstance(value, FunctionNode)]
        given = [*map(self.value, all_arguments(node))]
        if len(methods) == 1 and (len(given) != 1 or given[0][0] not in ("linear", "half")):
            return self._in_place(methods[0], self._owner, node)
        return ("call", attribute, given[0]) if len(given) == 1 and attribute != self._experts else None

    def _in_place(self, function: FunctionNode, owner: str, node: ast.Call) -> Term | None:
        args = function.args
        is_plain = not (args.vararg or args.kwarg or args.defaults or args.kw_defaults or function.decorator_list)
        names = parameter_names(function)
        given = arguments(node, names)
        if not is_plain or self._depth >= MAX_DEPTH or len(node.args) > len(names) or set(given) != set(names):
            return None
        values = {name: self.value(argument) for name, argument in given.items() if name}
        counts: frozenset[str] = self._counts if owner else frozenset()
        inner = Interpreter(
            self._anatomy, owner, function, values, counts, self._experts, self._called, depth=self._depth + 1
        )
        inner._loop_selection = self._loop_selection
        result = inner.run(function.body)
        self._loop_selection = inner._loop_selection
        return result if inner.sum is None else None
