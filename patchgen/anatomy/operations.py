"""What torch's operations make of the terms of `interpreter`: a term, or None where that is not understood."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from patchgen.errors import Missed

Term = tuple[Any, ...]


def is_term(part: object) -> TypeGuard[Term]:
    return isinstance(part, tuple)


ROW_DIMS = {"t", "k"}  # the dimensions of a mask that are not the experts': tokens and slots

# `SHARED`: functions of torch that are methods of tensors too. `OF_TORCH` adds functions that are no methods.
SHARED = (
    "mul multiply add floor_divide matmul mm bmm greater gt repeat_interleave argsort chunk permute sum any nonzero numel \
squeeze unsqueeze"
)
METHODS_ONLY = "mul_ new_zeros numpy cpu tolist size item reshape view contiguous to type type_as"
METHODS = frozenset(f"{SHARED} {METHODS_ONLY}".split())
OF_TORCH = f"{SHARED} empty_like cat promote_types where zeros_like zeros"
FUNCTIONS = {
    **{f"torch.{name}": name for name in OF_TORCH.split()},
    **{f"torch.nn.functional.{name}": name for name in ("linear", "one_hot")},
    "builtins.range": "range",
    "builtins.int": "item",
}
OPERATORS: dict[type[ast.operator], str] = {
    ast.MatMult: "matmul",
    ast.Mult: "mul",
    ast.Add: "add",
    ast.FloorDiv: "floor_divide",
}
# The parameters that are known of each operation; the first one of a method is the tensor.
PARAMETERS = {
    "input": "argsort any numel item contiguous numpy cpu tolist empty_like",
    "input other": "mul mul_ multiply add floor_divide matmul mm greater gt",
    "input mat2": "bmm",
    "input dim": "sum unsqueeze size",
    "input dim=None": "squeeze",
    "input dtype": "to type type_as",
    "input size": "new_zeros",
    "input repeats dim": "repeat_interleave",
    "input chunks dim=0": "chunk",
    "input as_tuple=False": "nonzero",
    "input weight bias=None": "linear",
    "input *sizes": "permute reshape view",
    "input *none dtype=None device=None": "zeros_like",
    "*size dtype=None device=None": "zeros",
    "tensor num_classes=-1": "one_hot",
    "tensors dim=0": "cat",
    "type1 type2": "promote_types",
    "condition": "where",
    "stop": "range",
    "dim index source": "index_add",
}
_PARAMETERS = {name: parameters.split() for parameters, names in PARAMETERS.items() for name in names.split()}


def bound(name: str, operands: Sequence[Any], named: Mapping[str, Any], node: ast.AST) -> list[Any]:
    """The arguments of an operation in the order of its parameters, matched by position and name as Python does.
    Raises Missed if an argument is missing, or is none that `PARAMETERS` knows."""
    remaining, by_name, arguments = list(operands), dict(named), list[Term]()
    for parameter in _PARAMETERS[name]:
        label, _, default = parameter.partition("=")
        if label.startswith("*"):
            arguments.append(tuple(remaining))
            remaining = []
        elif remaining:
            arguments.append(remaining.pop(0))
        elif label in by_name or default:
            arguments.append(by_name.pop(label) if label in by_name else ("const", ast.literal_eval(default)))
        else:
            raise Missed(f"`{label}` among the arguments", node)
    if remaining or by_name:
        raise Missed("arguments that the operation is known to take", node)
    return arguments


def operation(name: str, *given: Any) -> Term | None:
    """The term that an operation makes of its operands (`bound`); None if that is not understood."""
    match name, *given:
        case "mul" | "mul_" | "multiply", *factors:
            return ("const", 0) if ("const", 0) in factors else ("mul", *sorted(factors, key=repr))
        case "add", ("linear", x, weight, None, transposed), ("weight", bias):
            return ("linear", x, weight, bias, transposed)
        case "matmul" | "mm", x, ("weight", weight):
            return ("linear", x, weight, None, True)
        case "bmm", x, ("self", weight):
            return ("linear", x, weight, None, True)
        case "linear", x, ("weight", weight), ("weight" | "const", bias) if given[2][0] == "weight" or bias is None:
            return ("linear", x, weight, bias, False)
        case "chunk", ("linear", *_) as x, ("const", 2), ("const", -1):
            return ("tuple", (("half", x, 0), ("half", x, 1)))
        case "unsqueeze", ("value", *_) as x, ("const", -1):
            return ("column", x)
        case "unsqueeze", ("weights", *chosen), ("const", -1 | 1):
            return ("routing", *chosen)
        case "reshape" | "view", term, sizes:
            return _reshaped(term, sizes)
        case "contiguous", term:
            return term
        case "to" | "type" | "type_as", term, dtype:
            return _cast(term, dtype)
        case "promote_types", ("dtype", x), ("dtype", y):
            return ("promoted", x, y)
        case "zeros_like", x, (), dtype, _:
            return ("zeros", ("dtype", x) if dtype == ("const", None) else dtype)
        case "zeros", _, dtype, _:
            return ("zeros", None if dtype == ("const", None) else dtype)
        case "empty_like", ("repeated" | "outputs", *_) as x:
            return ("empty", x)
        case "cat", ("outputs", *_), ("const", 0):
            return given[0]
        case "repeat_interleave", ("value", *_) as x, _, ("const", 0):
            return ("repeated", x)  # K times: the mask `[T * K]` that selects rows of it fits no other number
        case "sum", ("mul", ("column", weights), ("slots of", x, selection)), ("const", 1):
            return ("combined", x, selection, weights)
        case _:
            return _chosen(name, *given)


def _chosen(name: str, *given: Any) -> Term | None:
    """The operations on terms that say which expert has which tokens."""
    match name, *given:
        case "one_hot", ("value", *_) as selection, ("experts" | "experts + 1",):
            return ("mask", selection, "tke")  # experts + 1: a class more, for tokens without an expert
        case "permute", ("mask", selection, order), sizes:
            dims = _integers(sizes[0][1] if len(sizes) == 1 and sizes[0][0] == "tuple" else sizes)
            is_whole = sorted(d % 3 for d in dims) == [0, 1, 2]
            return ("mask", selection, "".join(order[d] for d in dims)) if is_whole else None
        case "sum", ("mask", selection, order), ("tuple", dims) if {order[d % 3] for d in _integers(dims)} == ROW_DIMS:
            return ("count_of", selection)
        case "sum", ("marked", selection), ("const", 0):  # of a table of choices, over tokens
            return ("counts", selection)
        case "greater" | "gt", ("count_of", selection), ("const", 0):
            return ("hit", selection)
        case "nonzero", ("count_of" | "hit", selection), ("const", bool(False)):
            return ("hits", selection)
        case ("where", ("chosen", selection, order)) | (
            "nonzero",
            ("chosen", selection, order),
            ("const", bool(True)),
        ):
            return ("tuple", tuple(({"t": "tokens", "k": "slots"}[dim], selection) for dim in order))
        case ("squeeze", ("chosen", *_), ("const", 0)) | ("squeeze", ("hits", _), ("const", -1 | 1)):
            return given[0]  # the choices of one expert, or the experts that were hit, [n, 1]
        case "any", ("chosen", *_):
            return ("occupied",)
        case ("numel", ("tokens", _)) | ("size", ("tokens", _), ("const", 0)):
            return ("number of tokens",)
        case "size", term, dim:
            return ("size", term, dim)
        case "item", ("number",):
            return given[0]
        case "range", ("experts",):
            return ("range",)
        case "add", ("experts",), ("const", 1):
            return ("experts + 1",)
        case "add", ("number",), ("const", 0):
            return given[0]
        case "add", ("start", selection), ("count", of) if selection == of:
            return ("end", selection)
        case "argsort", ("flat", selection):
            return ("order", selection)
        case "floor_divide", ("order", selection), ("size", of, 1) if of == selection:
            return ("sorted tokens", selection)  # the token of each place in `[T * K]`
        case "new_zeros", ("value", *_) as selection, ("tuple", (("size", of, 0), ("experts",))) if of == selection:
            return ("table", selection)
        case "numpy" | "cpu" | "tolist", ("counts" | "tokens" | "slots", _):
            return given[0]
        case _:
            return None


def _reshaped(term: Term, sizes: tuple[Term, ...]) -> Term | None:
    """A reshape of rows to rows, `reshape(-1, hidden_dim)`: with any other width the next product would fail. Also of rows
    to equally many per expert, for a batched product, and back."""
    match term, sizes:
        case ("value", *_), (("const", -1),):
            return ("flat", term)
        case ("placed", *placement), (("all of", _), ("const", -1)):
            return ("slots of", *placement)  # [T, K, H], with the shape of the selection or of its weights
        case ("value", *_), (parts, ("const", -1), width):
            return ("shares", term, parts, width)
        case ("linear", *_), (("const", -1), width):
            return ("stacked rows", term, width)
        case ("weights", *chosen), (("const", -1), ("const", 1)):
            return ("routing", *chosen)
        case ("rows", *_), (("const", -1), (kind, *_)) if kind != "const":
            return term
        case _:
            return None


def _cast(term: Term, dtype: Term) -> Term | None:
    """A cast of what is summed, or of the sum, as a term; nothing for an expert's output that moves to a device, or for
    outputs that are cast to the dtype of their weights."""
    match term, dtype:
        case ("expert", *_), ("device", *_):
            return term
        case ("slots of", *_), ("dtype", ("value", *_)):
            return term  # the dtype of the weights, in which they are summed
        case ("combined", *_), _:
            return ("cast", term, dtype)
        case ("mul" | "sum", *_), ("dtype" | "library" | "value" | "zeros", *_):
            return ("cast", term)
        case _:
            return None


def _integers(terms: tuple[Term, ...]) -> list[int]:
    """The integers in constant terms; empty if a term is no integer constant."""
    known = all(term[0] == "const" and type(term[1]) is int for term in terms)
    return [term[1] for term in terms] if known else []
