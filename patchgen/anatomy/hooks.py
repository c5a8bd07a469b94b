"""Hooks that a file adds to tensors and modules, by torch's methods and functions for that, and forwards that it replaces.

A seam that computes what modules would compute does not call them, so it loses their hooks, and a forward set on an instance.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from patchgen.anatomy.classes import FunctionNode, calls, loaded, own_attribute, parameter_names, stores_of, walk
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.errors import Missed

# Hooks of tensors and of nodes of the graph, then of modules, with the attributes in which modules keep them.
# fmt: off
TENSOR_HOOKS = {"register_hook", "register_prehook", "register_post_accumulate_grad_hook", "register_multi_grad_hook"}
BACKWARD_HOOKS = {
    "register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_module_backward_hook", "register_module_full_backward_hook", "register_module_full_backward_pre_hook",
    "_backward_hooks", "_backward_pre_hooks",
}
FORWARD_HOOKS = {
    "register_forward_hook", "register_forward_pre_hook", "register_module_forward_hook",
    "register_module_forward_pre_hook", "_forward_hooks", "_forward_pre_hooks",
}
# fmt: on
REPARAMETRIZED = tuple(f"torch.nn.utils.{name}" for name in ("parametri", "weight_norm", "spectral_norm", "prune"))
CALLED = ("forward", "__call__", "_call_impl", "__class__")  # what a call of a module runs
GRADIENT_HOOKS = TENSOR_HOOKS | BACKWARD_HOOKS
MODULE_HOOKS = BACKWARD_HOOKS | FORWARD_HOOKS


def require_plain_calls(owner: str, what: str, anatomy: Anatomy) -> None:
    """Raises Missed if anything in the file may add a hook to a module of a class, or give one another call or forward than its
    class has: a seam does not call these modules."""
    for hook in added_hooks(owner, anatomy, MODULE_HOOKS):
        raise Missed(f"{what} without hooks", hook)
    family = anatomy.family(owner)
    for attribute in CALLED:
        defined = attribute != "forward" and any(attribute in info.methods for info in family)
        is_set = any(stores_of(info, attribute) for info in family)
        if defined or is_set or anatomy.is_stored_outside(attribute, [info.name for info in family]):
            raise Missed(f"{what} of modules that run the forward of their class", f"another value of {attribute}")


def added_hooks(owner: str, anatomy: Anatomy, kinds: Collection[str]) -> Iterator[str]:
    """What in the file may add a hook of these kinds to a module of a class, or to its tensors.

    Classes whose code its instances do not run may add hooks to themselves and to their own attributes, and to nothing else: which
    module or tensor that is is unknown.
    """
    family = [info.name for info in anatomy.family(owner)]
    for code in anatomy.names.outside_classes:
        yield from hooks(code, anatomy, kinds)
    for name, info in anatomy.classes.items():
        yield from hooks(info.node, anatomy, kinds, but_on_self=name not in family)


def require_plain_weights(owner: str, what: str, anatomy: Anatomy) -> None:
    """Raises Missed if anything that may reach the weights of a class reads what of torch computes a weight from others, or masks
    it, before each call of the module: functions, the code of the classes that hold it, and helpers, which are other classes that
    these give more than the parameters of an `__init__`."""
    family = {info.name for info in anatomy.family(owner)}
    holders = [name for name in anatomy.classes if family & anatomy.reached_from([name])]
    near = {info.name: info for name in holders for info in anatomy.family(name)}
    others = anatomy.classes.keys() - near.keys()
    computing = {name for name in others if _computes_weights(anatomy.classes[name].node, anatomy)}
    helpers = {name for name in others if computing & anatomy.reached_from([name])}
    found = [node for code in anatomy.names.outside_classes for node in _computes_weights(code, anatomy, helpers)]
    for info in near.values():
        found += _computes_weights(info.node, anatomy)
        found += [call for method in info.methods.values() for call in _gives_more(method, helpers)]
    if found:
        raise Missed(f"{what} without a weight that torch computes from others", found[0])


def _computes_weights(code: ast.AST, anatomy: Anatomy, classes: Collection[str] = ()) -> list[ast.expr]:
    """The names in code of what of torch computes a weight from others, and those of these classes."""
    names = [(n, anatomy.names.resolve(n) or "") for n in walk(code) if isinstance(n, ast.Name | ast.Attribute)]
    return [n for n, meaning in names if meaning.startswith(REPARAMETRIZED) or getattr(n, "id", "") in classes]


def _gives_more(method: FunctionNode, classes: Collection[str]) -> list[ast.Call]:
    """The calls in a method that read one of these classes beside `self` or a local name other than a parameter of `__init__`."""
    given = {*parameter_names(method)} - {"self"} if method.name == "__init__" else set[str]()
    more = {"self", *local_names(method)} - given
    return [call for call in calls(method) if not {*loaded(call)}.isdisjoint(classes) and more & {*loaded(call)}]


def hooks(code: ast.AST, anatomy: Anatomy, kinds: Collection[str], *, but_on_self: bool = False) -> Iterator[str]:
    """What reads a method or function of torch's that adds a hook, by their names; its call, if it is called. `but_on_self`
    leaves out hooks on `self` and on `self.<attribute>`."""
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
