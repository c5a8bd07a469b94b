"""Convolutions along one dimension, which mix the tokens of a sequence."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from patchgen.anatomy.classes import ClassInfo, FunctionNode, arguments, calls, own_attribute, targets, walk
from patchgen.anatomy.names import local_names

if TYPE_CHECKING:
    from patchgen.anatomy.graph import Anatomy

MODULE = "torch.nn.Conv1d"
FUNCTIONS = ("torch.nn.functional.conv1d", "torch.conv1d")
PARAMETERS = ("in_channels", "out_channels", "kernel_size")


def built_convolutions(anatomy: Anatomy, info: ClassInfo) -> dict[ast.Call, str]:
    """The calls in a class and its ancestors that build convolutions which mix tokens -> the attribute that each is assigned
    to, directly or inside a wrapper; "" if there is none."""
    nodes = [node for one in anatomy.lineage(info.name) for node in walk(one.node)]
    built = {node: "" for node in nodes if isinstance(node, ast.Call) and _mixes_tokens(anatomy, node)}
    for node in (node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign)):
        attributes = [own_attribute(target) or "" for target in targets(node)]
        built |= {call: attributes[0] for call in calls(node) if call in built}
    return built


def _mixes_tokens(anatomy: Anatomy, call: ast.Call) -> bool:
    """Whether a call builds a convolution, unless the source says that its kernel is one token long.

    Groups of channels make no difference. The kernel of a subclass is not read.
    """
    is_told = anatomy.names.resolve(call.func) == MODULE and not any(isinstance(a, ast.Starred) for a in call.args)
    kernel = arguments(call, PARAMETERS).get("kernel_size") if is_told else None
    return anatomy.is_a(call, MODULE) and not (isinstance(kernel, ast.Constant) and kernel.value == 1)


def convolutions(anatomy: Anatomy, method: FunctionNode, attributes: Collection[str] = ()) -> Iterator[ast.AST]:
    """The references to convolutions in a function's body, as the call where one is called; `attributes` hold convolutions."""
    local, nodes = local_names(method), [node for part in method.body for node in walk(part)]
    called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    read = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in ("weight", "bias")]
    for node in (node for node in nodes if isinstance(node, ast.Name | ast.Attribute) and node not in read):
        is_own = own_attribute(node) in attributes and isinstance(node.ctx, ast.Load)
        if is_own or anatomy.names.resolve(node, local) in FUNCTIONS:
            yield called.get(id(node), node)
