"""The sizes that a model's methods compute from grids of images and videos, and whether a collator computes the same."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy.classes import (
    FunctionNode,
    arguments,
    calls,
    constructed,
    dotted,
    own_attribute,
    parameter_names,
    plain_assignments,
    stored,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.media import FEATURE_METHODS
from patchgen.anatomy.names import is_of_config

# The config fields for the side of the square of patches that are merged into one feature, in the order in which
# `runtime/media_sizes.py` looks for them: a grid has `t * h * w // side**2` features. The first field holds a pair.
SIDES = ("merge_kernel_size", "spatial_merge_size", "merge_size")
SINGLE_SIDES = SIDES[1:]


def _grids(methods: Sequence[FunctionNode], method: FunctionNode, taken: str) -> set[str]:
    """The parameters of a method that hold the batch's grids `[N, 3]`: the one named `taken`, and those that all callers
    among `methods` pass `taken` to."""
    names = parameter_names(method)
    called = [c for one in methods for c in calls(one) if dotted(c.func).rpartition(".")[2] == method.name]
    given = [(name, ast.unparse(value)) for call in called for name, value in arguments(call, names).items()]
    others = {name for name, value in given if value != taken}
    return {taken} & {*names} | {name for name, value in given if name and value == taken} - others


def of_another_formula(anatomy: Anatomy, owner: str, method: FunctionNode) -> str:
    """Why a size that a method computes from grids `[N, 3]` is not what a collator computes; "" if all are.

    Also "" if no method of the file takes the grids of its modality.
    """
    known, changed = plain_assignments(method.body), stored(method)
    methods = [one for info in anatomy.classes.values() for one in info.methods.values()]
    grids = _grids(methods, method, taken := f"{modality_of(method.name)}_grid_thw")
    is_handed = any(taken in parameter_names(one) for one in methods)
    for _, _, sizes in listed_sizes(method) if is_handed else ():
        count, merger = sizes, None
        if isinstance(sizes, ast.BinOp) and isinstance(sizes.op, ast.FloorDiv):
            count, merger = sizes.left, sizes.right
        if isinstance(merger, ast.Name) and changed.count(merger.id) == 1:  # for the product of both sides
            merger = known.get(merger.id)
        match count:
            case ast.Call(ast.Attribute(ast.Name(grid), "prod"), [last]) | ast.Call(
                ast.Attribute(ast.Name(grid), "prod"), [], [ast.keyword("dim", last)]
            ) if ast.unparse(last) == "-1" and grid in grids - {*changed}:
                if (merger is None and count is sizes) or _side_of(anatomy, owner, merger) in SIDES:
                    continue
        if elsewhere := _held_elsewhere(anatomy, owner, merger):
            return f"{ast.unparse(sizes)} reads self.{elsewhere}, whose class stands in another file: no size is read there"
        return f"{ast.unparse(sizes)} is not the features of each grid, t * h * w // merge**2"
    return ""


def _held_elsewhere(anatomy: Anatomy, owner: str, code: ast.expr | None) -> str:
    """The first attribute that code reads and that is built as a model of another file; "" if there is none."""
    read = {own_attribute(node) for node in ast.walk(code or ast.Pass())}
    builds = [build for build in (*anatomy.builds(owner), *anatomy.auto_builds(owner)) if build.attribute in read]
    others = (build.attribute for build in builds if anatomy.target_of(build) not in anatomy.classes)
    return next(filter(None, others), "")


def _side_of(anatomy: Anatomy, owner: str, merger: ast.expr | None) -> str | None:
    """The config field of the side in `side**2` or `sides[0] * sides[1]`; None for other code."""
    match merger:
        case ast.BinOp(side, ast.Pow(), ast.Constant(2)):
            return in_config(anatomy, owner, side)
        case ast.BinOp(ast.Subscript(side, ast.Constant(0)), ast.Mult(), ast.Subscript(other, ast.Constant(1))):
            return in_config(anatomy, owner, side) if ast.unparse(side) == ast.unparse(other) else None
    return None


def in_config(
    anatomy: Anatomy, owner: str | None, value: ast.AST | None, visited: frozenset[ast.AST] = frozenset()
) -> str | None:
    """The config field that a value is read from, also through classes of the file: for `self.visual.merge` the field that
    the tower assigns to it. None if that is not known, or not one field."""
    if not isinstance(value, ast.Attribute) or value in visited:
        return None
    if is_of_config(value):
        return value.attr
    holder = _class_of(anatomy, owner, value.value)
    held = anatomy.held(holder, value.attr) if holder else ()
    names = {in_config(anatomy, holder, one, visited | {value}) for one in held}
    return names.pop() if len(names) == 1 else None


def _class_of(anatomy: Anatomy, owner: str | None, holder: ast.expr) -> str | None:
    """The class, of this file, of `self` or of an attribute that is built as one class; None if not known."""
    match holder:
        case ast.Name("self"):
            return owner if owner in anatomy.classes else None
        case ast.Attribute(outer, attribute) if of := _class_of(anatomy, owner, outer):
            classes = {_built_by(anatomy, of, value) for value in anatomy.held(of, attribute)}
            return classes.pop() if len(classes) == 1 else None
    return None


def _built_by(anatomy: Anatomy, owner: str, value: ast.AST) -> str | None:
    """The class of this file that a value is a construction of, and nothing around it."""
    if not isinstance(value, ast.Call):
        return None
    chosen = {anatomy.target_of(build) for build in anatomy.auto_builds(owner) if build.code == ast.unparse(value)}
    targets = chosen or {anatomy.names.here(constructed(value))}
    target = targets.pop() if len(targets) == 1 else None
    return target if target in anatomy.classes else None


def listed_sizes(method: FunctionNode) -> list[tuple[str, ast.Assign, ast.expr]]:
    """(name, statement, tensor) of each top-level statement `name = <tensor>.tolist()` of a method."""
    found: list[tuple[str, ast.Assign, ast.expr]] = []
    for node in method.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(tensor, "tolist"))):
                found.append((name, node, tensor))
    return found


def modality_of(method: str) -> str:
    """`image` for `get_image_features`; "" for the names of other methods."""
    found = FEATURE_METHODS.match(method)
    return found[1] if found else ""
