"""Which axes of a tensor are rows (tokens), and how operations change them.

A value is None if it has nothing to do with rows; else the axes of a tensor, a letter each; a `Size`; a `Layer`; a tuple of
values; or a list whose one element describes every part of a sequence. The letters: `r` rows, `.` another axis, `1` an axis
of size 1, `*` any number of axes of rows, `&` any number of other axes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeGuard

from patchgen.anatomy.known import ALONG, REDUCING

AXIS_MOVES = {"unsqueeze": 1, "unbind": 1, "cat": 1}  # operations that change the axes -> the position of `dim`


class Mixed(Exception):
    """Code that is not known to treat each row by itself; `reason` is the innermost code, or text, that explains it."""

    def __init__(self, node: ast.AST, reason: ast.AST | str = "") -> None:
        self.node, self.reason = node, reason or node


class Size(str):
    """A number: `r`, the number of rows; `1`; `~`, computed from the number of rows or from their lengths."""


class Result(str):
    """The axes of what a known module returns: one tensor, or each of a tuple."""


class Pieces(list["Value"]):
    """The axes of pieces of the rows, in order: they may be looped over and concatenated again, but not indexed."""


class Layer:
    """A module that treats each row by itself, whatever its other arguments and results are."""


Value: TypeAlias = "str | tuple[Value, ...] | list[Value] | Layer | None"


def has_rows(value: Value) -> bool:
    """Whether a value has to do with rows."""
    return any(map(has_rows, value)) if isinstance(value, tuple | list) else value is not None


def is_tensor(value: Value) -> TypeGuard[str]:
    return isinstance(value, str) and not isinstance(value, Size)


def last_axis(value: Value) -> str:
    """The letter of a tensor's last axis; `.` for None and the like."""
    return value[-1] if isinstance(value, str) else "."


def integer(node: ast.AST | None) -> int | None:
    """The value of an integer literal; None for any other code."""
    try:
        value = ast.literal_eval(node or "None")
    except (ValueError, TypeError):
        return None
    return value if type(value) is int else None


def axis_of(axes: Value, place: ast.expr | None, node: ast.AST) -> int:
    """The index in `axes`, from 0, of the axis that code names by its position `place`, from the front or the back. Raises
    `Mixed` if that is no literal in range, or an unknown number of axes lies between that end and the axis."""
    number = integer(place)
    if not is_tensor(axes) or number is None or not -len(axes) <= number < len(axes):
        raise Mixed(node)
    if set(axes[: number + 1] if number >= 0 else axes[number:]) & set("*&"):
        raise Mixed(node)
    return number % len(axes)


def sizes_of(axes: Value, node: ast.AST) -> tuple[Size | None, ...]:
    """The shape of a tensor. Raises `Mixed` if its number of axes is not known."""
    if not is_tensor(axes) or set(axes) & set("*&"):
        raise Mixed(node)
    return tuple(Size(axis) if axis in "r1" else None for axis in axes)


def size_of(axes: Value, place: ast.expr, node: ast.AST) -> Size | None:
    """The size of one axis of a tensor."""
    if axes is None:
        return None
    if not is_tensor(axes):
        raise Mixed(node)
    axis = axes[axis_of(axes, place, node)]
    return Size(axis) if axis in "r1" else None


def either(left: Value, right: Value, node: ast.AST) -> Value:
    """A value that is the one or the other; raises `Mixed` if both have to do with rows and differ."""
    if has_rows(left) and has_rows(right) and left != right:
        raise Mixed(node)
    return left if has_rows(left) else right


def any_of(values: Sequence[Value], node: ast.AST) -> Value:
    """A value that is one of several; raises `Mixed` as `either` does."""
    return functools.reduce(lambda left, right: either(left, right, node), values)


def joined(values: Sequence[Value], node: ast.AST) -> Value:
    """The result of an elementwise operation. A value that is None is taken to have no more axes than those with rows."""
    with_rows = [value for value in values if has_rows(value)]
    if with_rows and all(isinstance(value, Size) for value in with_rows):
        return Size("~")
    tensors = [value for value in with_rows if is_tensor(value)]
    if len(tensors) < len(with_rows):
        raise Mixed(node)
    return functools.reduce(functools.partial(_broadcast, node), tensors) if tensors else None


def _broadcast(node: ast.AST, left: str, right: str) -> str:
    if left == right:
        return left
    if "&" in left + right and left[:1] == right[:1] == "r":
        return min(left, right, key=lambda axes: "&" in axes)
    width = max(map(len, (left, right)))
    pairs = list(zip(left.rjust(width, "1"), right.rjust(width, "1"), strict=True))
    for pair in pairs:  # rows only meet rows, or an axis of size 1
        if ("*" in pair and pair != ("*", "*")) or ("r" in pair and not {*pair} <= {"r", "1"}):
            raise Mixed(node)
    broadcast_axes = "".join(next((letter for letter in "*r&." if letter in pair), "1") for pair in pairs)
    if broadcast_axes.count("r") + broadcast_axes.count("*") != 1:
        raise Mixed(node)
    return broadcast_axes


def indexed(axes: str, node: ast.Subscript) -> str:
    """The axes of `x[..., a:b]`, `x[:, :, a:b]` or `x[:, None, :]`: a slice of an axis other than the rows, or new axes."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    letters = {"...": "e", "None": "n", ":": ":"}
    kinds = [letters.get(ast.unparse(part), "s" if isinstance(part, ast.Slice) else "?") for part in parts]
    if axes == "*." and "".join(kinds) in ("e:", "es", "en", ":::", "::s"):
        return axes + "1" * ("n" in kinds)
    remaining, result_axes = list(axes), ""
    skipped_axes = len(axes) - sum(kind in ":s" for kind in kinds)  # those of `...`
    if "?" in kinds or skipped_axes < 0 or set(axes) & set("*&"):
        raise Mixed(node)
    for kind in kinds:
        consumed = [remaining.pop(0) for _ in range({"n": 0, "e": skipped_axes}.get(kind, 1))]
        if kind == "s" and consumed == ["r"]:
            raise Mixed(node)
        result_axes += "1" if kind == "n" else "".join(consumed)
    return result_axes + "".join(remaining)


def concatenated(parts: Value, along: ast.expr | None, node: ast.AST) -> str:
    """The axes of a `torch.cat` of `Pieces`, or of tensors along an axis other than the rows."""
    if not isinstance(parts, tuple | list) or not is_tensor(first := next(iter(parts), None)):
        raise Mixed(node)
    axis = axis_of(first, along, node)
    if any(part != first for part in parts) or (first[axis] == "r" and not isinstance(parts, Pieces)):
        raise Mixed(node)
    return first


def reshaped(axes: Value, sizes: Sequence[tuple[str, Value]], node: ast.AST) -> str:
    """The axes after `view` or `reshape` to these sizes, each as source and value: any axes may follow the rows, but only axes
    of size 1 precede them."""
    shape = "".join("1" if source == "1" else size if isinstance(size, Size) else "." for source, size in sizes)
    if not is_tensor(axes) or set(axes + shape) & set("*&~") or (axes + shape).count("r") != 2:
        raise Mixed(node)
    if "." in axes[: axes.find("r")] + shape[: shape.find("r")]:
        raise Mixed(node)
    return shape


def along(name: str, args: Sequence[ast.expr], named: Mapping[str | None, ast.expr]) -> ast.expr | None:
    """The `dim` argument of an operation whose first argument is the tensor; None without one."""
    places = ALONG | REDUCING | AXIS_MOVES
    return named.get("dim", named.get("axis", dict(enumerate(args)).get(places.get(name, -1))))


def along_axis(
    name: str, axes: str, args: Sequence[ast.expr], named: Mapping[str | None, ast.expr], node: ast.AST
) -> Value:
    """The result of an operation on one tensor along its axes."""
    dim = along(name, args, named)
    if name == "size":
        return sizes_of(axes, node) if dim is None else size_of(axes, dim, node)
    if name == "permute" and len(sizes_of(axes, node)) == len(axes):
        return "".join(axes[axis_of(axes, place, node)] for place in getattr(args[1], "elts", args[1:]))
    if name == "transpose":
        letters = list(axes)
        first_axis, second_axis = (axis_of(axes, place, node) for place in args[1:3])
        letters[first_axis], letters[second_axis] = letters[second_axis], letters[first_axis]
        return "".join(letters)
    if name == "unsqueeze":
        place = axis_of(f"{axes}.", dim, node)
        return axes[:place] + "1" + axes[place:]
    axis = axis_of(axes, dim if name == "unbind" or name in ALONG | REDUCING else None, node)
    if axes[axis] == "r":  # `split` keeps the pieces of the rows in order
        if name != "split":
            raise Mixed(node)
        return Pieces([axes])
    if name in ("chunk", "split"):
        return [axes]
    if name in ALONG:
        return axes
    keepdim = dict(enumerate(args)).get(REDUCING.get(name, 0) + 1) if name not in ("var", "std") else None
    kept_axis = "1" if getattr(named.get("keepdim", keepdim), "value", None) is True else ""
    reduced_axes = axes[:axis] + kept_axis + axes[axis + 1 :]
    if reduced_axes == "*":
        raise Mixed(node)  # the last axis would be one of the rows'
    return [reduced_axes] if name == "unbind" else reduced_axes
