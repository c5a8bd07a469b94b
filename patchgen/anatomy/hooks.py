"""Hooks that a file adds to tensors and modules, by torch's methods and functions for that, and forwards that it replaces.

A seam that computes what modules would compute does not call them, so it loses their hooks, and a forward set on an instance.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from patchgen.anatomy.classes import calls, own_attribute, walk
from patchgen.anatomy.graph import Anatomy
from patchgen.errors import Missed

TENSOR_HOOKS = {  # of tensors and of nodes of the graph
    "register_hook",
    "register_prehook",
    "register_post_accumulate_grad_hook",
    "register_multi_grad_hook",
}
BACKWARD_HOOKS = {
    "register_backward_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_module_backward_hook",
    "register_module_full_backward_hook",
    "register_module_full_backward_pre_hook",
}
FORWARD_HOOKS = {
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
}
REPARAMETRIZED = tuple(f"torch.nn.utils.{name}" for name in ("parametri", "weight_norm", "spectral_norm", "prune"))
CALLED = ("forward", "_call_impl", "__class__")  # what a call of a module runs
GRADIENT_HOOKS = TENSOR_HOOKS | BACKWARD_HOOKS
MODULE_HOOKS = BACKWARD_HOOKS | FORWARD_HOOKS


def outside_classes(anatomy: Anatomy) -> list[ast.stmt]:
    """The statements of the file but its classes."""
    statements = [node for statements in anatomy.names.statements.values() for node in statements]
    return [node for node in dict.fromkeys(statements) if not isinstance(node, ast.ClassDef)]


def require_plain_calls(owner: str, what: str, anatomy: Anatomy) -> None:
    """Raises Missed if anything in the file may add a hook to a module of a class, or give one another forward than its class has:
    a seam does not call these modules.

    Other classes may add hooks to themselves and to their own attributes, and to nothing else: which module that is is unknown.
    """
    for hook in _module_hooks(owner, anatomy):
        raise Missed(f"{what} without hooks", hook)
    own = [info.name for info in anatomy.lineage(owner)]
    for attribute in CALLED:
        if anatomy.is_stored_outside(attribute, own):
            raise Missed(f"{what} of modules that run the forward of their class", f"another value of {attribute}")


def _module_hooks(owner: str, anatomy: Anatomy) -> Iterator[str]:
    own = [info.name for info in anatomy.lineage(owner)]
    for code in outside_classes(anatomy):
        yield from hooks(code, anatomy, MODULE_HOOKS)
    for name, info in anatomy.classes.items():
        yield from hooks(info.node, anatomy, MODULE_HOOKS, but_on_self=name not in own)


def tensor_hooks(owner: str, anatomy: Anatomy) -> Iterator[str]:
    """What adds a hook to a tensor, in a class, its ancestors and the functions of the file that they may call."""
    for code in (*outside_classes(anatomy), *(info.node for info in anatomy.lineage(owner))):
        yield from hooks(code, anatomy, TENSOR_HOOKS)


def reparametrized(anatomy: Anatomy) -> ast.expr | None:
    """The first name in the file of what of torch computes a weight of a module from others, or masks it."""
    codes = (*outside_classes(anatomy), *(info.node for info in anatomy.classes.values()))
    names = (node for code in codes for node in walk(code) if isinstance(node, ast.Name | ast.Attribute))
    return next((name for name in names if (anatomy.names.resolve(name) or "").startswith(REPARAMETRIZED)), None)


def hooks(code: ast.AST, anatomy: Anatomy, kinds: Collection[str], *, but_on_self: bool = False) -> Iterator[str]:
    """What reads a method or function of torch's that adds a hook; its call, if it is called.

    Args:
        kinds: names of such methods and functions.
        but_on_self: leaves out hooks on `self` and on `self.<attribute>`.
    """
    called = {call.func: call for call in calls(code)}
    for node in walk(code):
        match node:
            case ast.Attribute(receiver, name) if name in kinds:
                is_on_self = ast.unparse(receiver) == "self" or own_attribute(receiver) is not None
                if not (but_on_self and is_on_self):
                    yield ast.unparse(called.get(node, node))
            case ast.Name() if (name := anatomy.names.resolve(node) or "").startswith("torch."):
                if name.rpartition(".")[2] in kinds:
                    yield ast.unparse(called.get(node, node))
            case ast.Constant(str(name)) if name in kinds:  # by `getattr`
                yield name
            case _:
                pass
