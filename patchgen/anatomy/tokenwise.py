"""Whether code treats the rows of a tensor (the tokens) one by one.

A loss that is computed in chunks of tokens calls the head on one chunk after the other, and fused experts call an
activation, a gate or a norm on rows in another order. Code that is not known to treat each row by itself is named, so
that it can be refused: a list of what is known, not of what is wrong. Names are resolved, never taken for what they
look like.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator, Sequence

from patchgen.anatomy.classes import (
    FunctionNode,
    base_name,
    calls,
    dotted,
    loaded,
    own_attribute,
    parameter_names,
    stored,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names

CASTS = frozenset({"float", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone", "detach"})
# fmt: off
POINTWISE = CASTS | {
    "tanh", "sigmoid", "exp", "log", "abs", "sqrt", "rsqrt", "pow", "square", "mul", "div", "add", "sub", "neg", "clamp",
    "clip", "where", "masked_fill", "full_like", "zeros_like", "ones_like", "nan_to_num", "gelu", "relu", "silu",
    "softplus", "layer_norm", "minimum", "maximum", "finfo",
}
# What works along a dimension, and the place of `dim` among torch's parameters; the tensor is the first, of a method too.
# `keepdim` follows on `dim` where there is one; without it the last dimension of the result would be another.
ALONG = {"softmax": 1, "log_softmax": 1, "size": 1, "normalize": 2, "chunk": 2, "split": 2, "cat": 1}
REDUCING = {"mean": 1, "sum": 1, "amax": 1, "amin": 1, "logsumexp": 1, "norm": 2, "var": 1, "std": 1}
PRODUCTS = frozenset({"linear", "matmul"})
LIBRARIES = ("torch", "torch.nn.functional", "torch.special", "transformers.activations")
ACTIVATIONS = frozenset({
    "SiLU", "GELU", "ReLU", "ReLU6", "Sigmoid", "Tanh", "Softplus", "Identity", "ELU", "LeakyReLU", "Mish", "Hardswish",
    "Hardsigmoid",
})
# fmt: on
NUMBERS = tuple(f"builtins.{name}" for name in ("float", "int", "getattr", "min", "max"))
ASSIGNED = ast.Assign | ast.AnnAssign | ast.NamedExpr
TURNED = {"transpose", "permute"}  # rows may no longer be the first dimension
# torch's modules that act on the last dimension, row by row.
ROW_MODULES = frozenset({"Linear", "LayerNorm", "RMSNorm"})
TABLES = ("transformers.activations.ACT2FN", "transformers.activations.ACT2CLS")
GETTERS = ("transformers.activations.get_activation",)
CHUNKED = "transformers.pytorch_utils.apply_chunking_to_forward"  # upstream's own chunks of tokens


def stored_names(node: ast.AST) -> set[str]:
    """The names that code assigns, or whose values it may change in place."""
    found: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute | ast.Subscript) and isinstance(child.ctx, ast.Store | ast.Del):
            found.add(base_name(child))
        elif isinstance(child, ast.Call) and _is_in_place(child.func):
            found.add(base_name(child.func))
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):  # called for what it changes
            found |= loaded_names(child.value)
    return (found - {"", "torch", "nn", "F", "logger", "warnings"}) | set(stored(node))


def loaded_names(node: ast.AST) -> set[str]:
    return set(loaded(node))


def mixing(
    body: Sequence[ast.stmt], tensors: set[str], owner: str, anatomy: Anatomy, known: Collection[str] = ()
) -> ast.AST | None:
    """The first piece of `body` (code of a method of `owner`) that is not known to treat the tokens one by one.

    Args:
        body: statements.
        tensors: the names that hold values per token where the body begins.
        owner: the class whose `self` the body uses.
        anatomy: of the file, for the functions, methods and modules that the body calls.
        known: classes and operations that may be called besides.
    """
    reader = _Reader(anatomy, owner, {"self"} | local_names(ast.Module(list(body), [])) | tensors, known=known)
    return next(reader.statements(body, tensors), None)


def mixing_member(anatomy: Anatomy, owner: str, attribute: str, *, fixed: bool) -> ast.AST | str | None:
    """The first piece of what `self.<attribute>(rows)` runs that is not known to treat each row by itself.

    Args:
        anatomy: of the file.
        owner: the class of `self`.
        attribute: a method, or an attribute that holds a module or function.
        fixed: whether learned values count too: what is called must be a function of the rows alone.
    """
    call = ast.parse(f"self.{attribute}(rows)", mode="eval").body
    reader = _Reader(anatomy, owner, {"self", "rows"}, fixed=fixed)
    found = next(reader.own(attribute, call), None)
    return reader.reason if found is call else found


class _Reader:
    def __init__(
        self,
        anatomy: Anatomy,
        owner: str,
        local: set[str],
        seen: frozenset = frozenset(),
        *,
        fixed: bool = False,
        known: Collection[str] = (),
    ) -> None:
        self._known = known
        self._anatomy, self._owner, self._local, self._seen, self._fixed = anatomy, owner, local, seen, fixed
        self.reason: ast.AST | str = ""  # the innermost code that was in the way

    def statements(self, body: Sequence[ast.stmt], tensors: set[str]) -> Iterator[ast.AST]:
        made = tensors | {name for statement in body for name in stored_names(statement)} - {"self"}
        given = [statement for statement in body if not self._mentions(statement, made)]  # of modules and config alone
        others = {name for statement in body if statement not in given for name in stored_names(statement)}
        tensors = tensors | others - {"self"}
        for statement in body:
            if isinstance(statement, ast.If):
                if _is_inference(statement.test):
                    yield from self._inference(statement.body, tensors)
                else:
                    yield from self._expression(statement.test, tensors)
                    yield from self.statements(statement.body, tensors)
                yield from self.statements(statement.orelse, tensors)
            elif isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return):
                yield from self._expression(statement, tensors)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            elif isinstance(statement, ast.Expr) and _is_in_place(getattr(statement.value, "func", statement.value)):
                yield from self._expression(statement, tensors)
            else:
                yield statement

    def _inference(self, body: Sequence[ast.stmt], tensors: set[str]) -> Iterator[ast.AST]:
        """A branch that training never takes may go through the logits piece by piece: `x[s] = f(x[s])`."""
        for statement in body:
            if isinstance(statement, ast.With | ast.While):
                yield from self._inference(statement.body, tensors)
                continue
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
                target, call = statement.targets[0], statement.value
                same = isinstance(call, ast.Call) and call.args and ast.unparse(call.args[0]) == ast.unparse(target)
                if same and not any(self._mentions(arg, tensors) for arg in call.args[1:]):
                    continue  # upstream itself divides the tokens here
            if any(self._mentions(node, tensors - stored_names(statement)) for node in ast.walk(statement)):
                yield statement

    def _expression(self, node: ast.AST, tensors: set[str]) -> Iterator[ast.AST]:
        called = {id(child.func) for child in ast.walk(node) if isinstance(child, ast.Call)}
        for child in ast.walk(node):
            match child:
                case ast.Call() if self._mentions(child, tensors):
                    yield from self._called(child, tensors)
                case ast.Subscript(value) if self._mentions(value, tensors) and not self._keeps(child, tensors):
                    yield child
                case ast.BinOp(_, ast.MatMult(), right) if self._mentions(right, tensors):
                    yield child
                case ast.Attribute(value, "T" | "mT" | "H" | "mH") if self._mentions(value, tensors):
                    yield child
                case ast.comprehension() | ast.Lambda() | ast.Yield() | ast.Await() | ast.Starred():
                    yield child
            own = own_attribute(child) if self._fixed and id(child) not in called else None
            if own and not is_number(self._anatomy, self._owner, own):
                yield child
        shapes = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == "shape"]
        last = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Subscript) and _is_last(n.slice)}
        yield from (shape for shape in shapes if self._mentions(shape.value, tensors) and id(shape) not in last)

    def _called(self, call: ast.Call, tensors: set[str]) -> Iterator[ast.AST]:
        resolved = self._anatomy.names.resolve(call.func, self._local)
        attribute = own_attribute(call.func) or (own_attribute(call.args[0]) if resolved == CHUNKED else None)
        if attribute is not None:
            yield from self.own(attribute, call)
        elif resolved is not None and resolved.startswith(".") and resolved[1:] in self._anatomy.names.functions:
            yield from self._body("", self._anatomy.names.functions[resolved[1:]], call)
        elif resolved == "builtins.isinstance":
            return
        elif resolved is None and isinstance(call.func, ast.Attribute) and self._mentions(call.func.value, tensors):
            bound = [call.func.value, *call.args]
            yield from self._operation(call.func.attr.rstrip("_"), call, bound, tensors)
        else:
            library, _, name = (resolved or "").rpartition(".")
            yield from self._operation(name, call, call.args, tensors) if library in LIBRARIES else (call,)

    def _operation(self, name: str, call: ast.Call, args: list[ast.expr], tensors: set[str]) -> Iterator[ast.AST]:
        """A function of torch, or a method of a tensor, with its arguments by position."""
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        place = (ALONG | REDUCING).get(name)
        if name in PRODUCTS:
            others = [*args[1:], *(value for key, value in named.items() if key != "input")]
            is_known = not any(self._mentions(value, tensors) for value in others)
        elif place is not None:
            given = dict(enumerate(args))
            is_known = _is_last(named.get("dim", named.get("axis", given.get(place))))
            kept = named.get("keepdim", given.get(place + 1) if name not in ("var", "std") else None)
            is_known &= name in ALONG or (isinstance(kept, ast.Constant) and kept.value is True)
        else:
            is_known = is_pointwise(name, args, named) or name in self._known
        if not is_known:
            yield call

    def own(self, attribute: str, call: ast.Call) -> Iterator[ast.AST]:
        """A call of a method, or of the module or function that an attribute holds."""
        held = self._anatomy.held(self._owner, attribute)
        if not held or not all(self._is_known(value, call) for value in held):
            meaning = " or ".join(map(ast.unparse, held)) or "not said in the class"
            self.reason = self.reason or f"self.{attribute}, which is {meaning}"[:400]
            yield call

    def _is_known(self, value: ast.expr | ast.stmt, call: ast.Call) -> bool:
        """Whether calling the value, or the method, treats every row by itself."""
        if isinstance(value, FunctionNode):
            return not list(self._body(self._owner, value, call))
        handed = self._anatomy.handed(self._owner, value)
        if handed:
            return all(self._is_known(part, call) for part in handed)
        if ast.unparse(value) == "None" or (isinstance(value, ast.Attribute) and _is_of_config(value)):
            return True  # None, or a function that a caller put into the config for an activation
        resolve = self._anatomy.names.resolve
        function = value.func if isinstance(value, ast.Call) else value
        resolved = resolve(function.value if isinstance(function, ast.Subscript) else function) or ""
        library, _, name = resolved.rpartition(".")
        if isinstance(function, ast.Subscript):
            return resolved in TABLES
        if isinstance(value, ast.Call):
            if library == "torch.nn":
                if name == "Sequential":
                    return all(self._is_known(part, call) for part in value.args)
                sizes = _has_sizes(value.args[:1], {k.arg: k.value for k in value.keywords})
                return name in ACTIVATIONS or (name in ROW_MODULES and not self._fixed and not sizes)
            found = self._anatomy.method(name, "forward") if not library else None
            return (
                resolved in GETTERS
                or name in self._known
                or (found is not None and not list(self._body(name, found[1], call)))
            )
        if not library and name in self._anatomy.names.functions:
            return not list(self._body("", self._anatomy.names.functions[name], call))
        return library in LIBRARIES and name in POINTWISE

    def _body(self, owner: str, function: FunctionNode, call: ast.Call) -> Iterator[ast.AST]:
        """`call`, if the code that it runs is not known to treat every row by itself. `owner` is the class of self."""
        if (owner, function.name) in self._seen:
            return
        seen = self._seen | {(owner, function.name)}
        reader = _Reader(self._anatomy, owner, local_names(function), seen, fixed=self._fixed, known=self._known)
        wrong = next(reader.statements(function.body, set(parameter_names(function))), None)
        if wrong is not None or self._anatomy.names.is_wrapped(function):
            self.reason = reader.reason or wrong or function.decorator_list[0]
            yield call

    def _keeps(self, node: ast.Subscript, tensors: set[str]) -> bool:
        """Whether it is some of the last dimension, or all of what is written there by a fixed index."""
        columns = node.slice.elts[-1:] if isinstance(node.slice, ast.Tuple) and isinstance(node.ctx, ast.Store) else []
        if columns and not self._mentions(columns[0], tensors):
            node = copy.deepcopy(node)
            node.slice.elts[-1] = ast.Slice()
        return keeps_tokens(node)

    @staticmethod
    def _mentions(node: ast.AST, tensors: set[str]) -> bool:
        return bool(loaded_names(node) & tensors)


def is_number(anatomy: Anatomy, owner: str, attribute: str) -> bool:
    """Whether `self.<attribute>` is a number that the config gives, and no tensor that is learned or changes."""
    held = anatomy.held(owner, attribute)
    return bool(held) and all(_is_number(value, anatomy, owner) for value in held)


def _is_number(value: ast.AST, anatomy: Anatomy, owner: str, seen: frozenset[str] = frozenset()) -> bool:
    """A constant, something of a config, or what arithmetic and a choice make of them."""
    if isinstance(value, ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.IfExp):
        parts = (part for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))
        return all(isinstance(part, ast.Compare) or _is_number(part, anatomy, owner, seen) for part in parts)
    if isinstance(value, ast.Call):
        is_plain = anatomy.names.resolve(value.func) in NUMBERS
        return is_plain and all(_is_number(part, anatomy, owner, seen) for part in value.args)
    if isinstance(value, ast.Subscript):
        return _is_number(value.value, anatomy, owner, seen)
    if isinstance(value, ast.Name) and value.id != "config":
        return value.id not in seen and _is_number_by_name(value, anatomy, owner, seen | {value.id})
    return isinstance(value, ast.Constant) or _is_of_config(value)


def _is_number_by_name(name: ast.Name, anatomy: Anatomy, owner: str, seen: frozenset[str]) -> bool:
    """A parameter of `__init__`: by its annotation, else by what it is handed, else by its default; or a local name there."""
    init = anatomy.method(owner, "__init__")
    if init is None:
        return False
    args = init[1].args
    annotations = {arg.arg: ast.unparse(arg.annotation) for arg in args.args if arg.annotation is not None}
    defaults = dict(zip([arg.arg for arg in args.args[::-1]], args.defaults[::-1], strict=False))
    known = [node.value for node in ast.walk(init[1]) if isinstance(node, ast.Assign) and name.id in stored(node)]
    if annotations.get(name.id) not in ("float", "int", "bool"):
        known += anatomy.handed(owner, name) or [defaults[n] for n in defaults if n == name.id]
        known = known or [name.ctx]  # nothing tells
    return all(_is_number(value, anatomy, owner, seen) for value in known)


def _is_of_config(value: ast.AST) -> bool:
    """`config` and `self.config` hold the configuration, by transformers' contract: no tensor, nothing that is learned."""
    return dotted(value) == "config" or dotted(value).startswith(("config.", "self.config."))


def is_pointwise(name: str, args: list[ast.expr], named: dict[str | None, ast.expr]) -> bool:
    """Whether an operation with these arguments, the tensor first, treats each row by itself wherever its rows are."""
    if name == "where":
        return len(args) + len(named) == 3  # of a condition alone: the places where it holds
    return name in POINTWISE and not (name == "layer_norm" and _has_sizes(args[1:2], named))


def _has_sizes(args: list[ast.expr], named: dict[str | None, ast.expr]) -> bool:
    """Whether a norm is over several dimensions."""
    shapes = [*args, named.get("normalized_shape")]
    return any(isinstance(shape, ast.Tuple | ast.List) and len(shape.elts) != 1 for shape in shapes)


def _is_in_place(function: ast.expr) -> bool:
    """Whether it is a method like `mul_`."""
    return isinstance(function, ast.Attribute) and function.attr.endswith("_") and not function.attr.endswith("__")


def _is_last(node: ast.AST | None) -> bool:
    return isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-1"


def _is_inference(test: ast.expr) -> bool:
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return any(ast.unparse(part) == "not self.training" for part in parts)


def keeps_tokens(node: ast.Subscript) -> bool:
    """`x[..., a:b]`, `x[:, :, a:b]`, or a dimension of the shape; only the last dimension is touched."""
    if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return _is_last(node.slice)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if not (isinstance(parts[-1], ast.Slice) or ast.unparse(parts[-1]) == "None"):
        return False  # the last dimension would be another
    if isinstance(parts[0], ast.Constant) and parts[0].value is ...:
        return len(parts) == 2
    whole = [isinstance(p, ast.Slice) and p.lower is p.upper is p.step is None for p in parts]
    return len(parts) == 3 and all(whole[:2])


def is_size(node: ast.AST, sized: set[str]) -> bool:
    """Whether an expression is made of a tensor's sizes: `x.shape[0]`, names of such, arithmetic of them."""
    match node:
        case ast.Attribute(_, "shape") | ast.Call(ast.Attribute(_, "size" | "numel")) | ast.Call(ast.Name("len")):
            return True
        case ast.Name(name):
            return name in sized
        case ast.Subscript(value) | ast.Starred(value) | ast.UnaryOp(_, value):
            return is_size(value, sized)
        case ast.BinOp(left, _, right) | ast.IfExp(_, left, right):
            return is_size(left, sized) or is_size(right, sized)
        case ast.Tuple(parts) | ast.List(parts):
            return any(is_size(one, sized) for one in parts)
        case ast.Call(ast.Attribute(value)) if is_size(value, sized):
            return True
        case ast.Call(function, arguments) if not isinstance(function, ast.Attribute) or dotted(function).startswith(
            "math."
        ):
            return any(is_size(one, sized) for one in arguments)
    return False


def sized_names(code: ast.AST, sized: set[str]) -> set[str]:
    """The names that hold sizes, `sized` and what code assigns; of `a, b = x, len(x)` the second."""
    assigned = [n for n in ast.walk(code) if isinstance(n, ASSIGNED) and n.value]
    pairs = [(target, n.value) for n in assigned for target in getattr(n, "targets", None) or [n.target]]
    for target, value in list(pairs):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs.remove((target, value))
            pairs += zip(target.elts, value.elts, strict=False)
    for target, value in pairs * 3:  # sizes of sizes
        sized = sized | (set(stored(target)) - set(loaded(value)) if is_size(value, sized) else set())
    return sized


def turned_before(code: ast.AST, attends: set[str]) -> set[ast.AST]:
    """What is called on, or made of, rows that a statement before has turned; the attention turns them back."""
    names, coming, found = set(), set(), set()
    for node in _in_order(code):
        if isinstance(node, ast.stmt):
            names |= coming
            coming = set()
        made = getattr(node, "func", getattr(node, "value", None) if isinstance(node, ASSIGNED) else None)
        inner = [c for c in calls(made) if dotted(c.func) in attends] if made is not None else []
        if made is None or (inner and not isinstance(node, ASSIGNED)):
            continue
        is_turned = not inner and bool(names & set(loaded(made)))
        if isinstance(node, ast.Call):
            found |= {node} if is_turned else set()
            continue
        turns = [c for c in calls(made) if getattr(c.func, "attr", "") in TURNED]
        if is_turned or any(not inner or any(one in inner for one in calls(c.func)) for c in turns):
            coming = set(stored(node))
    return found


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes in the order of the source."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
