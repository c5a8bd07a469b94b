"""The sizes that a model's methods compute of the grids of images and videos, and whether a collator computes the same."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy.classes import (
    FunctionNode,
    arguments,
    calls,
    dotted,
    own_attribute,
    parameter_names,
    plain_assignments,
    stored,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.media import FEATURES

# The fields of configs that hold a merger's side, in the order in which `runtime/media_sizes.py` looks for them: features
# of a grid are `t * h * w // side**2`. The first holds a pair.
SIDES = ("merge_kernel_size", "spatial_merge_size", "merge_size")
LENGTHS_OF_SIDES = SIDES[1:]


def _grids(methods: Sequence[FunctionNode], method: FunctionNode, taken: str) -> set[str]:
    """The parameters of a method that hold the batch's grids `[N, 3]`, `taken`: by that name, or handed on by callers."""
    names = parameter_names(method)
    called = [c for one in methods for c in calls(one) if dotted(c.func).rpartition(".")[2] == method.name]
    given = [pair for call in called for pair in arguments(call, names).items()]
    return {taken} & {*names} | {name for name, value in given if name and ast.unparse(value) == taken}


def of_another_formula(anatomy: Anatomy, owner: str, method: FunctionNode) -> str:
    """Sizes that a method of a model that takes grids `[N, 3]` computes otherwise than a collator does."""
    known, changed = plain_assignments(method.body), stored(method)
    methods = [one for info in anatomy.classes.values() for one in info.methods.values()]
    grids = _grids(methods, method, taken := f"{modality_of(method.name)}_grid_thw")
    is_handed = any(taken in parameter_names(one) for one in methods)
    for _, _, sizes in listed_sizes(method) if is_handed else ():
        count, merger = sizes, None
        if isinstance(sizes, ast.BinOp) and isinstance(sizes.op, ast.FloorDiv):
            count, merger = sizes.left, sizes.right
        if (
            isinstance(merger, ast.Name) and changed.count(merger.id) == 1
        ):  # a local that holds the product of both sides
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
    """The attribute in code that holds a model of another file."""
    read = {own_attribute(node) for node in ast.walk(code or ast.Pass())}
    builds = [build for build in (*anatomy.builds(owner), *anatomy.auto_builds(owner)) if build.attribute in read]
    others = (build.attribute for build in builds if anatomy.target_of(build) not in anatomy.classes)
    return next(filter(None, others), "")


def _side_of(anatomy: Anatomy, owner: str, merger: ast.expr | None) -> str | None:
    """What a config calls the side of a square, `side**2` or `sides[0] * sides[1]`."""
    match merger:
        case ast.BinOp(side, ast.Pow(), ast.Constant(2)):
            return in_config(anatomy, owner, side)
        case ast.BinOp(ast.Subscript(side, ast.Constant(0)), ast.Mult(), ast.Subscript(other, ast.Constant(1))):
            return in_config(anatomy, owner, side) if ast.unparse(side) == ast.unparse(other) else None
    return None


def in_config(anatomy: Anatomy, owner: str | None, value: ast.AST | None) -> str | None:
    """The name by which a config holds a value: of `self.visual.merge`, what the tower's `__init__` reads for it."""
    *held, name = (dotted(value) if value is not None else "").split(".")
    if held[:1] != ["self"]:  # a config that the class is built with, or a local of any meaning
        init = anatomy.method(owner, "__init__") if held and owner in anatomy.classes else None
        return name if init is not None and held[0] in parameter_names(init[1]) else None
    if held[1:2] == ["config"]:
        return name
    for attribute in held[1:]:
        builds = [*anatomy.builds(owner), *anatomy.auto_builds(owner)] if owner in anatomy.classes else []
        owner = next((anatomy.target_of(build) for build in builds if build.attribute == attribute), None)
    return in_config(anatomy, owner, anatomy.attribute(owner, name)) if owner in anatomy.classes else None


def listed_sizes(method: FunctionNode) -> list[tuple[str, ast.Assign, ast.expr]]:
    """Of each of a method's own statements `sizes = <tensor>.tolist()`: the name, the statement and the tensor."""
    found: list[tuple[str, ast.Assign, ast.expr]] = []
    for node in method.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(tensor, "tolist"))):
                found.append((name, node, tensor))
    return found


def modality_of(method: str) -> str:
    """`image` of `get_image_features`; empty for other methods."""
    found = FEATURES.match(method)
    return found[1] if found else ""
