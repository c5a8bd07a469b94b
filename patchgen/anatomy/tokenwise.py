"""Whether code that turns hidden states into logits treats the tokens one by one.

A loss that is computed in chunks of tokens calls the head on one chunk after the other. Code that is not known to
treat each token by itself is named, so that it can be refused: a list of what is known, not of what is wrong.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from patchgen.anatomy.classes import dotted, own_attribute, parameter_names
from patchgen.anatomy.graph import Anatomy

POINTWISE = frozenset(
    [
        "float",
        "half",
        "bfloat16",
        "to",
        "type",
        "type_as",
        "contiguous",
        "clone",
        "detach",
        "tanh",
        "sigmoid",
        "exp",
        "log",
        "abs",
        "sqrt",
        "rsqrt",
        "pow",
        "square",
        "mul",
        "div",
        "add",
        "sub",
        "neg",
        "clamp",
        "where",
        "masked_fill",
        "full_like",
        "zeros_like",
        "ones_like",
        "nan_to_num",
        "gelu",
        "relu",
        "silu",
        "softplus",
        "layer_norm",
        "soft_cap",  # imported; one of this file is read
        "isinstance",
    ]
)
OVER_LAST = frozenset(
    ["mean", "sum", "softmax", "log_softmax", "norm", "normalize", "amax", "amin", "logsumexp", "var", "std", "size"]
)
PRODUCTS = frozenset({"linear", "matmul"})
# Modules that mix tokens, or (dropout) that give another result each time a chunk is computed.
REFUSED_MODULES = ("Conv", "Dropout", "LSTM", "GRU", "RNN", "Attention", "BatchNorm", "InstanceNorm", "Pool")


def stored_names(node: ast.AST) -> set[str]:
    """The names that code assigns, or whose values it may change in place."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store | ast.Del):
            found.add(child.id)
        elif isinstance(child, ast.Attribute | ast.Subscript) and isinstance(child.ctx, ast.Store | ast.Del):
            found.add(_base(child))
        elif isinstance(child, ast.Call) and _is_in_place(child.func):
            found.add(_base(child.func))
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):  # called for what it changes
            found |= loaded_names(child.value)
    return found - {"", "torch", "nn", "F", "logger", "warnings"}


def loaded_names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def mixing(body: Sequence[ast.stmt], tensors: set[str], owner: str, anatomy: Anatomy) -> ast.AST | None:
    """The first piece of `body` (code of a method of `owner`) that is not known to treat the tokens one by one.

    Args:
        body: statements.
        tensors: the names that hold values per token where the body begins.
        owner: the class whose `self` the body uses.
        anatomy: of the file, for the functions, methods and modules that the body calls.
    """
    return next(_Reader(anatomy, owner, frozenset()).statements(body, tensors), None)


class _Reader:
    def __init__(self, anatomy: Anatomy, owner: str, seen: frozenset[tuple[str, str]]) -> None:
        self._anatomy, self._owner, self._seen = anatomy, owner, seen

    def statements(self, body: Sequence[ast.stmt], tensors: set[str]) -> Iterator[ast.AST]:
        tensors = tensors | {name for statement in body for name in stored_names(statement)} - {"self"}
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
            elif isinstance(statement, ast.Expr) and dotted(statement.value).endswith("_"):
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
                    yield from self._called(call, tensors)
                    continue
            if any(self._mentions(node, tensors - stored_names(statement)) for node in ast.walk(statement)):
                yield statement

    def _expression(self, node: ast.AST, tensors: set[str]) -> Iterator[ast.AST]:
        for child in ast.walk(node):
            if isinstance(child, ast.Call) and self._mentions(child, tensors):
                yield from self._called(child, tensors)
            elif isinstance(child, ast.Subscript) and self._mentions(child.value, tensors):
                if not _keeps_tokens(child):
                    yield child
            elif isinstance(child, ast.BinOp) and isinstance(child.op, ast.MatMult):
                if self._mentions(child.right, tensors):
                    yield child
            elif isinstance(child, ast.Attribute) and child.attr in ("T", "mT", "H", "mH"):
                if self._mentions(child.value, tensors):
                    yield child
            elif isinstance(child, ast.comprehension | ast.Lambda | ast.Yield | ast.Await | ast.Starred):
                yield child
        shapes = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == "shape"]
        last = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Subscript) and _is_last(n.slice)}
        yield from (shape for shape in shapes if self._mentions(shape.value, tensors) and id(shape) not in last)

    def _called(self, call: ast.Call, tensors: set[str]) -> Iterator[ast.AST]:
        attribute = own_attribute(call.func)
        name = dotted(call.func).rpartition(".")[2].rstrip("_")
        if name == "apply_chunking_to_forward" and own_attribute(call.args[0]):  # upstream's own chunks of tokens
            attribute = own_attribute(call.args[0])
        if attribute is not None:
            yield from self._own(attribute, call)
        elif isinstance(call.func, ast.Name) and call.func.id in self._anatomy.functions:
            yield from self._body(call.func.id, self._anatomy.functions[call.func.id], self._owner, call)
        elif name in PRODUCTS:
            if any(self._mentions(arg, tensors) for arg in call.args[1:]):
                yield call
        elif name in OVER_LAST:
            given = [*call.args, *(k.value for k in call.keywords if k.arg in ("dim", "axis"))]
            if not any(_is_last(value) for value in given):
                yield call
        elif name not in POINTWISE:
            yield call

    def _own(self, attribute: str, call: ast.Call) -> Iterator[ast.AST]:
        """A call of a method or of a module: of this file, it is read too."""
        method = self._anatomy.method(self._owner, attribute)
        if method is not None:
            yield from self._body(attribute, method[1], self._owner, call)
            return
        value = self._anatomy.attribute(self._owner, attribute)
        if value is not None and any(kind in dotted(value).rpartition(".")[2] for kind in REFUSED_MODULES):
            yield call
        for build in self._anatomy.builds(self._owner):
            found = self._anatomy.method(build.target, "forward") if build.attribute == attribute else None
            if found is not None:
                yield from self._body(build.target, found[1], build.target, call)

    def _body(self, name: str, function: ast.FunctionDef, owner: str, call: ast.Call) -> Iterator[ast.AST]:
        if (owner, name) in self._seen:
            return
        reader = _Reader(self._anatomy, owner, self._seen | {(owner, name)})
        if next(reader.statements(function.body, set(parameter_names(function))), None) is not None:
            yield call

    @staticmethod
    def _mentions(node: ast.AST, tensors: set[str]) -> bool:
        return bool(loaded_names(node) & tensors)


def _is_in_place(function: ast.expr) -> bool:
    """Whether it is a method like `mul_`."""
    return isinstance(function, ast.Attribute) and function.attr.endswith("_") and not function.attr.endswith("__")


def _base(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_last(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-1"


def _is_inference(test: ast.expr) -> bool:
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return any(ast.unparse(part) == "not self.training" for part in parts)


def _keeps_tokens(node: ast.Subscript) -> bool:
    """`x[..., a:b]`, `x[:, :, a:b]`, or a dimension of the shape; only the last dimension is touched."""
    if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return _is_last(node.slice)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if isinstance(parts[0], ast.Constant) and parts[0].value is ...:
        return len(parts) == 2
    whole = [isinstance(p, ast.Slice) and p.lower is p.upper is p.step is None for p in parts]
    return len(parts) == 3 and all(whole[:2])
