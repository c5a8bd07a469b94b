"""Whether the forward of a model uses a projection to its vocabulary."""

from __future__ import annotations

import ast

from patchgen.anatomy.classes import FunctionNode, arguments, own_attribute, walk
from patchgen.anatomy.flow import LINEAR
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.origins import origins

SIZE = "vocab_size"  # the field of every config of transformers for the size of the vocabulary
GETTER = "get_output_embeddings"  # transformers' method of every model


def uses_projection(anatomy: Anatomy, owner: str, forward: FunctionNode) -> bool:
    """Whether a forward, or a method of class `owner` that it uses, uses a linear layer with `vocab_size` output features.

    Any use counts, not only a call: passes read what is done with the layer, and may refuse it.
    """
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
    values = anatomy.held(owner, attribute) or [anatomy.attribute(owner, attribute)]  # other code may set it too
    return any(_is_to_vocabulary(anatomy, owner, value) for value in values if isinstance(value, ast.expr))


def _is_to_vocabulary(
    anatomy: Anatomy, owner: str, value: ast.expr, visited: frozenset[ast.AST] = frozenset()
) -> bool:
    for of, module in origins(anatomy, owner, value):
        if not isinstance(module, ast.Call) or module in visited:
            continue
        if anatomy.is_a(module, "torch.nn.Sequential"):
            if any(_is_to_vocabulary(anatomy, of, last, visited | {module}) for last in module.args[-1:]):
                return True
        elif anatomy.is_a(module, LINEAR):
            rows = arguments(module, ("in_features", "out_features")).get("out_features", module)
            if _counts_words(anatomy, of, rows):
                return True
    return False


def _counts_words(anatomy: Anatomy, owner: str, size: ast.AST, visited: frozenset[ast.AST] = frozenset()) -> bool:
    """Whether a size is computed from a config's `vocab_size`, through any names, attributes and operations."""
    if size in visited:
        return False
    parts = [(owner, child) for child in ast.iter_child_nodes(size)]
    if isinstance(size, ast.Name | ast.Attribute):
        parts = [(of, origin) for of, origin in origins(anatomy, owner, size) if origin is not size]
    match size:
        case ast.Attribute(_, name) if name == SIZE and not (parts and own_attribute(size)):
            return True  # of a config, or of `self` where nothing tells what it holds
        case ast.Call(function, [_, ast.Constant(name), *_]) if name == SIZE:
            return anatomy.names.resolve(function) == "builtins.getattr"
        case _:
            return any(_counts_words(anatomy, of, part, visited | {size}) for of, part in parts)
