"""Reads how a PreTrainedModel of the file initialises the weight of an `nn.Linear`."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from dataclasses import dataclass

from patchgen.anatomy.classes import ClassInfo, FunctionNode, calls, dotted, inlined, loaded, plain_assignments, walk
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import LINEAR
from patchgen.errors import Missed
from patchgen.source import Module

METHOD = "_init_weights"
# What PreTrainedModel does by default; a few configs have another name for the deviation.
INHERITED = 'mean=0.0, std=getattr(self.config.get_text_config(), "initializer_range", 0.02)'
LIBRARIES = ("torch.nn.init", "transformers.initialization")
WRITERS = ("normal_", "trunc_normal_")


@dataclass(frozen=True)
class LinearInit:
    """`nn.init.<writer>(weight, <arguments>)`, in terms of self alone."""

    writer: str
    arguments: str


def initialising_classes(anatomy: Anatomy, module: Module) -> list[ClassInfo]:
    """The model classes whose `_init_weights` must handle new modules: base classes, and overrides that do not call super."""
    classes: list[ClassInfo] = []
    for name in anatomy.models_in(module):
        info = anatomy.classes[name]
        is_root = not any(base in anatomy.classes and anatomy.is_model(base) for base in info.bases)
        method = info.methods.get(METHOD)
        if is_root or (method is not None and not _asks_super(method)):
            classes.append(info)
    return classes


def read_linear_init(anatomy: Anatomy, info: ClassInfo) -> LinearInit:
    """How the class initialises linear layers: by its own method, or by the one it inherits from transformers. Raises
    Missed if it has another form."""
    method = info.methods.get(METHOD)
    if method is None:
        return LinearInit("normal_", INHERITED)
    for node in walk(method):
        match node:
            case ast.If(ast.Call(function, [module, kinds])) as branch:
                of_linear = any(anatomy.names.resolve(kind) == LINEAR for kind in walk(kinds))
                if of_linear and anatomy.names.resolve(function) == "builtins.isinstance":
                    return _rule(anatomy, method, branch, ast.unparse(module))
    if _asks_super(method):
        return LinearInit("normal_", INHERITED)
    raise Missed(f"a branch of {info.name}.{METHOD} for nn.Linear", method)


def _rule(anatomy: Anatomy, method: FunctionNode, branch: ast.If, module: str) -> LinearInit:
    """Reads `module.weight.data.normal_(mean=0.0, std=std)` or `nn.init.normal_(module.weight, std=std)` in a branch."""
    known = plain_assignments(method.body)
    weights = (f"{module}.weight", f"{module}.weight.data")
    for call in (call for statement in branch.body for call in calls(statement)):
        match call.func, call.args:
            case ast.Attribute(weight, writer), given if ast.unparse(weight) in weights:
                pass
            case ast.Attribute(library, writer), [weight, *given] if ast.unparse(weight) in weights:
                if anatomy.names.resolve(library) not in LIBRARIES:
                    continue
            case _:
                continue
        if writer not in WRITERS:
            continue
        resolved: list[ast.expr | ast.keyword] = [inlined(argument, known) for argument in given]
        resolved += [ast.keyword(keyword.arg, inlined(keyword.value, known)) for keyword in call.keywords]
        free = {name for argument in resolved for name in loaded(argument)} - {"self"}
        if not free & local_names(method):
            return LinearInit(writer, ", ".join(map(ast.unparse, resolved)))
    raise Missed(f"{' or '.join(WRITERS)} of module.weight with values that come from self.config", branch)


def _asks_super(method: FunctionNode) -> bool:
    return any(dotted(call.func) == f"super.{METHOD}" for call in calls(method))
