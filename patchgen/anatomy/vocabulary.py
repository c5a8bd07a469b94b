"""Whether the forward of a model uses a projection to its vocabulary."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from patchgen.anatomy.classes import FunctionNode, arguments, assigned_to, own_attribute, walk
from patchgen.anatomy.flow import LINEAR

if TYPE_CHECKING:
    from patchgen.anatomy.graph import Anatomy

SIZE = "vocab_size"  # the field of every config of transformers for the size of the vocabulary
GETTER = "get_output_embeddings"  # transformers' method of every model


def uses_projection(anatomy: Anatomy, owner: str, forward: FunctionNode) -> bool:
    """Whether a forward, or a method of class `owner` that it uses, uses a linear layer with `vocab_size` output features."""
    code = with_methods(anatomy, owner, forward)
    used = attributes_read(*code)
    everything = {name for info in anatomy.lineage(owner) for name in info.attributes}
    hands_on_self = GETTER in used or any(map(_hands_on_self, code))
    return any(is_projection(anatomy, owner, name) for name in sorted(everything if hands_on_self else used))


def with_methods(anatomy: Anatomy, owner: str, code: ast.AST) -> list[ast.AST]:
    """Code of class `owner`, and the methods that it uses, directly or through others."""
    reached = [code]
    for part in reached:  # it grows meanwhile
        methods = (anatomy.method(owner, name) for name in sorted(attributes_read(part)))
        reached += [method[1] for method in methods if method is not None and method[1] not in reached]
    return reached


def attributes_read(*code: ast.AST) -> set[str]:
    """The attributes of `self` that code reads, those that it calls included."""
    nodes = (node for part in code for node in walk(part) if isinstance(getattr(node, "ctx", None), ast.Load))
    return {name for node in nodes if (name := own_attribute(node))}


def _hands_on_self(code: ast.AST) -> bool:
    """Whether code uses `self` other than for an attribute, as in `getattr(self, name)`: it may then use any attribute."""
    of_attributes = {id(node.value) for node in walk(code) if isinstance(node, ast.Attribute)}
    return any(isinstance(n, ast.Name) and n.id == "self" and id(n) not in of_attributes for n in walk(code))


def is_projection(anatomy: Anatomy, owner: str, attribute: str) -> bool:
    """Whether `self.<attribute>` may be a linear layer to the vocabulary, or a sequence of modules that ends in one."""
    values = anatomy.held(owner, attribute) or [anatomy.attribute(owner, attribute)]
    return any(_is_to_vocabulary(anatomy, owner, value) for value in values)


def _is_to_vocabulary(anatomy: Anatomy, owner: str, value: ast.AST | None) -> bool:
    if not isinstance(value, ast.Call):
        return False
    if anatomy.is_a(value, "torch.nn.Sequential"):
        return any(_is_to_vocabulary(anatomy, owner, last) for last in value.args[-1:])
    rows = arguments(value, ("in_features", "out_features")).get("out_features", value)
    return anatomy.is_a(value, LINEAR) and _counts_words(anatomy, owner, rows)


def _counts_words(anatomy: Anatomy, owner: str, size: ast.AST, visited: frozenset[str] = frozenset()) -> bool:
    """Whether a size is computed from a config's `vocab_size`, through names of `__init__` and attributes."""
    init = anatomy.method(owner, "__init__")
    for node in walk(size):
        attribute, text = own_attribute(node), ast.unparse(node) if isinstance(node, ast.expr) else ""
        held = anatomy.held(owner, attribute) if attribute else ()
        if isinstance(node, ast.Name) and init is not None:
            held = assigned_to(init[1], node.id) or ()
        match node:
            case ast.Attribute(_, name) if name == SIZE and not held:
                return True
            case ast.Call(ast.Name("getattr"), [_, ast.Constant(name), *_]) if name == SIZE:
                return True
        if text not in visited and any(_counts_words(anatomy, owner, one, visited | {text}) for one in held):
            return True
    return False
