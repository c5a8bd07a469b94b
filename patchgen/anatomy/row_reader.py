"""Follows the axes of rows (`axes`) through the code of a class, what it calls in its file, and torch's operations."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from patchgen.anatomy import axes, known
from patchgen.anatomy.axes import Layer, Mixed, Pieces, Result, Size, Value, has_rows, is_tensor, joined
from patchgen.anatomy.classes import (
    FunctionNode,
    all_arguments,
    arguments,
    base_name,
    calls,
    dotted,
    is_in_place,
    loaded,
    own_attribute,
    parameter_names,
    stored,
    targets,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.anatomy.origins import is_one_size
from patchgen.anatomy.roles import LIST

CONVOLVED = {"torch.nn.Conv1d": "r..", "torch.nn.Conv2d": "r...", "torch.nn.Conv3d": "r...."}
INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface"
LENGTHS_TEST = "is_flash_attention_requested"
UPSTREAM_NUMBERS = {"get_max_seqlen"}
LENGTH_ARGUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # of the attention interface
ACTIVATION_GETTERS = ("transformers.activations.get_activation",)
CHUNKING = "transformers.pytorch_utils.apply_chunking_to_forward"  # upstream's own chunks of tokens


class RowReader:
    """Runs code on axes of rows; raises `Mixed` where rows may mix. `tokenwise` explains `known`, `groups` and `fixed`."""

    def __init__(
        self,
        anatomy: Anatomy,
        owner: str,
        local: Container[str],
        values: Mapping[str, Value],
        visited: frozenset[tuple[str, str]] = frozenset(),
        *,
        fixed: bool = False,
        known: Collection[str] = (),
        groups: bool = False,
    ) -> None:
        self._anatomy, self._owner, self._local, self._visited = anatomy, owner, local, visited
        self._fixed, self._known, self._groups = fixed, known, groups
        self._modules: dict[str, list[ast.expr]] = {}  # loop variable -> the modules that it may be
        self.values, self._attention_functions, self._memo = dict(values), set[str](), dict[ast.expr, Value]()
        self._slices: set[str] = set()  # names of slices of matrices
        self.returned: Value = None
        self._in_pieces = False  # in a loop over pieces of rows

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Runs statements: afterwards `values` has the axes of each name, `returned` those of what a `return` returns."""
        for statement in body:
            match statement:
                case ast.If(test, inside) if _is_inference(test):
                    self._run_inference_branch(inside)
                    self.run(statement.orelse)
                case ast.If(ast.Call(function), inside) if self._is_upstream(function, LENGTHS_TEST):
                    self.run(inside)  # ranks that divide rows attend by lengths
                    if isinstance(inside[-1], ast.Return):
                        return
                case ast.If():
                    if has_rows(self.value(statement.test)):
                        raise Mixed(statement.test)
                    before = dict(self.values)
                    self.run(statement.body)
                    after, self.values = self.values, before
                    self._memo.clear()
                    self.run(statement.orelse)
                    names = {*after, *self.values}
                    self.values = {n: axes.either(after.get(n), self.values.get(n), statement) for n in names}
                    self._memo.clear()
                case ast.For(ast.Name(name), source, body, []) if modules := self._listed_modules(source):
                    self._set(name, None)
                    self._modules[name] = modules
                    self.run(body * 2)  # what one module returns is an input of the next
                case ast.For(ast.Name(name), source, orelse=[]) if isinstance(pieces := self.value(source), list):
                    around, self._in_pieces = self._in_pieces, isinstance(pieces, Pieces)
                    appended = [dotted(c.func) for c in calls(statement) if dotted(c.func).endswith(".append")]
                    if len(appended) > len(set(appended)):
                        raise Mixed(statement)
                    for _ in range(2):  # what one piece leaves is an input of the next
                        self._set(name, pieces[0])
                        self.run(statement.body)
                    self._in_pieces = around
                case ast.Return(value):
                    self.returned = axes.either(self.returned, value and self.value(value), statement)
                case ast.Assign() | ast.AnnAssign():
                    self._assign(statement)
                case ast.AugAssign(target, _, value):
                    self._store(target, joined([self.value(target), self.value(value)], statement), statement)
                case ast.Expr(ast.Constant()):
                    continue  # a docstring
                case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"), [part])) if isinstance(
                    self.values.get(name), list
                ):
                    self._set(name, (Pieces if self._in_pieces else list)([self.value(part)]))
                case ast.Expr(ast.Call(ast.Attribute(changed) as function) as call) if is_in_place(function):
                    self._store(changed, self.value(call), statement)
                case _:
                    raise Mixed(statement)

    def _assign(self, statement: ast.Assign | ast.AnnAssign) -> None:
        source = statement.value
        match source:
            case ast.Call(function) if self._is_upstream(function, INTERFACE):
                self._attention_functions |= set(stored(statement))
                return
            case ast.Call(ast.Attribute(matrix, "split")) if self._is_matrix(matrix):
                self._slices |= set(stored(statement))
        if source is not None:
            for target in targets(statement):
                self._store(target, self.value(source), statement)

    def _store(self, target: ast.expr, value: Value, node: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self._set(target.id, value)
        elif isinstance(target, ast.Tuple) and not isinstance(value, Size | Pieces):
            number = len(target.elts)
            if isinstance(value, list):
                value = tuple(value * number)
            elif value is None or isinstance(value, Result):
                value = (value,) * number
            if not isinstance(value, tuple) or len(value) != number:
                raise Mixed(node)
            for part, element in zip(target.elts, value, strict=True):
                self._store(part, element, node)
        elif has_rows(value) or (has_rows(self.values.get(base_name(target))) and not self._is_column(target)):
            raise Mixed(node)

    def _is_column(self, target: ast.expr) -> bool:
        """Whether a target is `x[:, :, index]`, a column of all rows."""
        match target:
            case ast.Subscript(owner, ast.Tuple([_, *_, last] as parts)) if is_tensor(owner_axes := self.value(owner)):
                self._require_no_rows(last)
                return bool(axes.indexed(owner_axes, ast.Subscript(owner, ast.Tuple([*parts[:-1], ast.Slice()]))))
        return False

    def _set(self, name: str, value: Value) -> None:
        self.values[name] = value
        self._modules.pop(name, None)
        self._memo.clear()

    def _run_inference_branch(self, body: Sequence[ast.stmt]) -> None:
        """A branch that training never takes may change the logits piece by piece: `x[s] = f(x[s])`."""
        for statement in body:
            if isinstance(statement, ast.With | ast.While):
                self._run_inference_branch(statement.body)
                continue
            match statement:
                case ast.Assign([ast.Subscript() as part, *_], ast.Call(_, [same, *others])) if ast.unparse(
                    same
                ) == ast.unparse(part) and not any(map(self._reads_rows, others)):
                    continue  # upstream itself works on slices of the tokens here
            if self._reads_rows(statement):
                raise Mixed(statement)

    def _listed_modules(self, source: ast.expr) -> list[ast.expr]:
        """The elements of the module list in an attribute or property; empty for any other expression."""
        match self._anatomy.held(self._owner, own_attribute(source) or ""):
            case [ast.FunctionDef(body=[*_, ast.Return(ast.expr() as held)], decorator_list=[kind])]:
                return self._listed_modules(held) if self._resolve(kind) == "builtins.property" else []
            case [ast.Call(function, [ast.List() | ast.ListComp() as modules])] if self._resolve(function) == LIST:
                return modules.elts if isinstance(modules, ast.List) else [modules.elt]
        return []

    def _are_sizes(self, nodes: Iterable[ast.expr]) -> bool:
        """Whether all values are sizes (`Size`), or have nothing to do with rows."""
        return all(isinstance(self.value(node), Size | None) for node in nodes)

    def _reads_rows(self, node: ast.AST) -> bool:
        return any(has_rows(self.values.get(name)) for name in loaded(node))

    def _resolve(self, node: ast.AST) -> str:
        return self._anatomy.names.resolve(node, self._local) or ""

    def _is_upstream(self, node: ast.expr, name: str) -> bool:
        return self._anatomy.names.is_upstream(node, name, self._local)

    def value(self, node: ast.expr) -> Value:
        """The axes of rows in an expression. Raises Mixed if it may mix rows."""
        if node not in self._memo:  # which is cleared when a name is set
            self._memo[node] = self._value(node)
        return self._memo[node]

    def _value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant():
                return None
            case ast.Name(name):
                return self.values.get(name)
            case ast.List([]):
                return [None]
            case ast.NamedExpr(target, source):
                self._store(target, self.value(source), node)
                return self.values[target.id]
            case ast.Tuple(parts) | ast.List(parts):
                return tuple(map(self.value, parts))
            case ast.ListComp(part, [ast.comprehension(ast.Name(), source, [])]) if not has_rows(self.value(source)):
                return [self.value(part)]
            case ast.Attribute(owner, name):
                return self._attribute(node, owner, name)
            case ast.Subscript():
                return self._subscript(node)
            case ast.BinOp(left, ast.MatMult(), right):
                return self._call_operation("matmul", node, [left, right], {})
            case ast.Compare(left, [ast.Is() | ast.IsNot()]):
                self.value(left)
                return None
            case ast.Call():
                return self._call(node)
            case ast.IfExp(test, left, right):
                if has_rows(self.value(test)):
                    raise Mixed(test)
                return axes.either(self.value(left), self.value(right), node)
            case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.Dict():
                parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
                if not isinstance(node, ast.Dict) or self._are_sizes(parts):
                    return joined([self.value(part) for part in parts], node)
            case ast.JoinedStr() if not self._reads_rows(node):
                return None
        raise Mixed(node)

    def _attribute(self, node: ast.Attribute, owner: ast.expr, name: str) -> Value:
        attribute = own_attribute(node)
        if attribute:
            if self._fixed and not known.is_number(self._anatomy, self._owner, attribute):
                raise Mixed(node)
            return None
        owner_value = self.value(owner)
        if owner_value is None or name in ("dtype", "device"):
            return None
        if name in ("T", "mT", "H", "mH"):
            raise Mixed(node)
        return axes.sizes_of(owner_value, node) if name == "shape" else owner_value

    def _subscript(self, node: ast.Subscript) -> Value:
        place = axes.integer(node.slice)
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape" and place is not None:
            return axes.size_of(self.value(node.value.value), node.slice, node)
        indexed_value = self.value(node.value)
        match indexed_value:
            case None:
                if self._reads_rows(node.slice) and not isinstance(node.slice, ast.Slice | ast.Tuple):
                    raise Mixed(node)
                self._require_no_rows(node.slice)
                return None
            case Size():
                return Size("~")
            case Result() if place is not None:
                return indexed_value
            case tuple() if place is not None and -len(indexed_value) <= place < len(indexed_value):
                return indexed_value[place]
            case list() if place is not None and not isinstance(indexed_value, Pieces):
                return indexed_value[0]
            case str():
                self._require_no_rows(node.slice)
                return axes.indexed(indexed_value, node)
        raise Mixed(node)

    def _require_no_rows(self, node: ast.expr) -> None:
        """Raises `Mixed` if a part of an index has to do with rows."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        for part in parts:
            for bound in (part.lower, part.upper, part.step) if isinstance(part, ast.Slice) else [part]:
                if bound is not None and has_rows(self.value(bound)):
                    raise Mixed(node)

    def _call(self, call: ast.Call) -> Value:
        resolved, function = self._resolve(call.func), call.func
        library, _, name = resolved.rpartition(".")
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        if resolved == CHUNKING and (attribute := own_attribute(call.args[0])):
            inner = ast.Call(call.args[0], [arg for arg in call.args[1:] if has_rows(self.value(arg))], [])
            return self.call_own(attribute, inner)
        if resolved in ("builtins.isinstance", "torch.is_tensor"):
            return None
        if isinstance(function, ast.Name) and function.id in self._attention_functions:
            return self._call_attention(call, named)
        if isinstance(function, ast.Name) and function.id in self._modules:
            return self._call_any(self._modules[function.id], call)
        if isinstance(function, ast.Subscript) and (modules := self._listed_modules(function.value)):
            return self._call_any(modules, call)
        if isinstance(function, ast.Name) and isinstance(self.values.get(function.id), Layer):
            return self._known_result(map(self.value, all_arguments(call)))
        if attribute := own_attribute(function):
            return self.call_own(attribute, call) if self._passes_rows(call) else None
        if (base := self._inherited_module(function)) and self._passes_rows(call):
            return self._call_value(base, call)
        if called := self._anatomy.names.functions.get(self._anatomy.names.here(function, self._local)):
            return self._call_function("", called, call)
        if not resolved and isinstance(function, ast.Attribute) and has_rows(changed := self.value(function.value)):
            if is_tensor(changed) and f"torch.Tensor.{function.attr}" in self._known:
                return self._known_result([changed])
            return self._call_operation(function.attr.rstrip("_"), call, [function.value, *call.args], named)
        if not self._passes_rows(call):
            return None
        if resolved in self._known:
            return self._known_result(map(self.value, call.args))
        if library in known.LIBRARIES:
            return self._call_operation(name, call, call.args, named)
        makes_number = resolved in known.NUMBERS or (library.startswith("transformers.") and name in UPSTREAM_NUMBERS)
        if makes_number and self._are_sizes(all_arguments(call)):
            return Size("~")
        raise Mixed(call)

    def _known_result(self, given: Iterable[Value]) -> Result:
        """The result of a call of one of `known`: with the rows of the first tensor among the arguments."""
        return Result(next((value for value in given if isinstance(value, str)), "*."))

    def _passes_rows(self, call: ast.Call) -> bool:
        """Whether an argument of a call has to do with rows."""
        values = (arg.value if isinstance(arg, ast.Starred) else arg for arg in all_arguments(call))
        return any(has_rows(self.value(value)) for value in values)

    def _call_attention(self, call: ast.Call, named: dict[str | None, ast.expr]) -> Value:
        """transformers' attention interface: q, k, v `[1, heads, rows, dim]` to `[1, rows, heads, dim]` and weights."""
        query, *others = [self.value(arg) for arg in call.args[1:4]]
        more = [*call.args[4:], *(value for key, value in named.items() if key not in LENGTH_ARGUMENTS)]
        if query != "1.r." or any(other != query for other in others) or any(map(has_rows, map(self.value, more))):
            raise Mixed(call)
        return ("1r..", None)

    def _call_operation(
        self, name: str, call: ast.AST, args: Sequence[ast.expr], named: dict[str | None, ast.expr]
    ) -> Value:
        """A function of torch or method of a tensor; `args` are the positional arguments, the tensor first."""
        args = [*([named.pop("input")] if "input" in named and not args else []), *args]
        first = self.value(args[0]) if args else None
        others = [*args[1:], *named.values()]
        if isinstance(first, Size) and self._are_sizes(others):
            return Size("~")
        norm = (self._anatomy, self._owner, args[1:2], named)
        is_known = name != "layer_norm" or (axes.last_axis(first) != "r" and is_one_size(*norm))
        if is_known and known.is_pointwise(name, args, named):
            return joined([self.value(arg) for arg in (*args, *named.values())], call)
        if name == "cat":
            return axes.concatenated(first, axes.along(name, args, named), call)
        if name in ("view", "reshape"):
            sizes = self.value(args[1]) if len(args) == 2 else None
            size_values = sizes if isinstance(sizes, tuple) else [self.value(size) for size in args[1:]]
            sources = list(map(ast.unparse, args[1:])) if size_values is not sizes else [""] * len(size_values)
            is_merged = self._groups and isinstance(first, str) and first[:1] == "r" and sources[:1] == ["-1"]
            if is_merged and not any(has_rows(self.value(size)) for size in args[2:]):
                return "r".ljust(len(sources), ".")
            return axes.reshaped(first, list(zip(sources, size_values, strict=True)), call)
        if not isinstance(first, str) or any(has_rows(self.value(arg)) for arg in others):
            raise Mixed(call)
        if name in known.PRODUCTS and axes.last_axis(first) == "." and all(map(self._is_matrix, others[:1])):
            return first
        return axes.along_axis(name, first, args, named, call)

    def _is_matrix(self, factor: ast.AST) -> bool:
        match factor:
            case ast.Subscript(ast.Name(name), ast.Name() | ast.Constant()):
                return name in self._slices
        return known.is_matrix(self._anatomy, self._owner, factor)

    def call_own(self, attribute: str, call: ast.Call) -> Value:
        """A call of a method, or of the module or function that an attribute holds."""
        return self._call_any(self._anatomy.held(self._owner, attribute), call)

    def _inherited_module(self, function: ast.expr) -> ast.Call | None:
        """What `super().forward` calls in a class derived from one of `torch.nn` alone, as a module of that one."""
        owner = self._anatomy.classes.get(self._owner)
        match function, owner and owner.node.bases:
            case ast.Attribute(ast.Call(parent, [], []), "forward"), [base] if self._resolve(
                parent
            ) == "builtins.super" and self._resolve(base).startswith("torch.nn."):
                return ast.Call(base, [], [])
        return None

    def _call_any(self, held: Sequence[ast.expr | ast.stmt], call: ast.Call) -> Value:
        """A call of one of several methods, modules or functions."""
        if not held:
            raise Mixed(call, f"{ast.unparse(call.func)}, which is not said in the class")
        return axes.any_of([self._call_value(value, call) for value in held], call)

    def _call_value(self, value: ast.expr | ast.stmt, call: ast.Call) -> Value:
        """The result of calling a value or method with rows."""
        if isinstance(value, FunctionNode):
            return self._call_function(self._owner, value, call)
        if handed := self._anatomy.handed(self._owner, value):
            return self._call_any(handed, call)
        given = [*map(self.value, all_arguments(call))]
        same = joined(given, call) if all(isinstance(value_given, str | None) for value_given in given) else None
        is_of_config = isinstance(value, ast.Attribute) and known.is_left_in_config(self._anatomy, value)
        if ast.unparse(value) == "None" or is_of_config:
            return same  # None, or an activation function that a caller put into the config
        function = value.func if isinstance(value, ast.Call) else value
        resolved = self._resolve(function.value if isinstance(function, ast.Subscript) else function)
        library, _, name = resolved.rpartition(".")
        if isinstance(function, ast.Subscript) and resolved in known.TABLES:
            return same
        if isinstance(value, ast.Call) and not isinstance(function, ast.Subscript):
            if library == "torch.nn" and name == "Sequential":
                for part in value.args:
                    self._call_value(part, call)
                return same
            is_row = name in known.ROW_MODULES and not self._fixed and axes.last_axis(same) == "."
            is_row &= name == "Linear" or is_one_size(self._anatomy, self._owner, value.args[:1], arguments(value, ()))
            if resolved in ACTIVATION_GETTERS or (library == "torch.nn" and (name in known.ACTIVATIONS or is_row)):
                return same
            if resolved in self._known:
                return self._known_result(given)
            form = CONVOLVED.get(resolved)
            if form and not self._fixed and same in (form, "r&"):
                return form
            forward = self._anatomy.method(name, "forward") if not library else None
            if forward is not None:
                return self._call_function(name, forward[1], call)
        elif not library and name in self._anatomy.names.functions:
            return self._call_function("", self._anatomy.names.functions[name], call)
        elif library in known.LIBRARIES and name in known.POINTWISE:
            return same
        raise Mixed(call, f"{ast.unparse(call.func)}, which is {ast.unparse(value)}"[:400])

    def _call_function(self, owner: str, function: FunctionNode, call: ast.Call) -> Value:
        """The result of a function or method of the file; `owner` is the class of its `self`."""
        names = parameter_names(function)
        values = {name: self.value(value) for name, value in arguments(call, names).items() if name}
        if not any(map(has_rows, values.values())) and not self._passes_rows(call):
            return None
        if (owner, function.name) in self._visited:
            return next(filter(has_rows, values.values()), None)
        visited, local = self._visited | {(owner, function.name)}, local_names(function)
        fixed, known, groups = self._fixed, self._known, self._groups
        reader = RowReader(self._anatomy, owner, local, values, visited, fixed=fixed, known=known, groups=groups)
        try:
            if self._anatomy.names.is_wrapped(function):
                raise Mixed(function.decorator_list[0])
            is_plain = len(call.args) <= len(names) and set(values) <= {*names} and None not in arguments(call, names)
            if not is_plain or any(isinstance(arg, ast.Starred) for arg in call.args):
                raise Mixed(call)
            reader.run(function.body)
        except Mixed as mixed:
            raise Mixed(call, mixed.reason) from mixed
        return reader.returned


def _is_inference(test: ast.expr) -> bool:
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return any(ast.unparse(part) == "not self.training" for part in parts)
