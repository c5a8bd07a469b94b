"""Finds operations in generated forwards that make the host wait for the device."""

# pyright: reportMatchNotExhaustive=false

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Self

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import FunctionNode, arguments, parameter_names, walk
from patchgen.anatomy.imported import library_function
from patchgen.anatomy.names import local_names
from patchgen.anatomy.training_path import Condition, reachable_functions, statements_with_reasons
from patchgen.errors import PassMismatch
from patchgen.passes.base import Example, Hit, Outcome, Pass
from patchgen.source import Module

if TYPE_CHECKING:
    from patchgen.model_configs import ModelConfig

SYNCING_METHODS = ("item", "tolist", "nonzero", "cpu", "numpy")
SYNCING_FUNCTIONS = ("torch.nonzero",)
SYNCING_TESTS = {"any", "all"}


class HostSyncLint(Pass):
    """A `.item()` in a layer stalls the host once per layer and step, and is easily overlooked."""

    name = "host_sync_lint"
    purpose = "Lists .item(), .tolist(), .nonzero() and `if tensor.any()` in the training path of generated forwards."
    expects = "nothing: findings are listed; with `strict`, a finding that is not allowed by name is an error"
    EXAMPLES = (
        Example("""reports, rewrites nothing
        class ExampleTower(nn.Module):
            def forward(self, x, lengths):
                return x.split(lengths.tolist())
        """),
    )

    def __init__(self, allow: Mapping[str, str] | None = None, *, strict: bool = False) -> None:
        self.allow, self.strict = dict(allow or {}), strict

    @classmethod
    def of_config(cls, config: ModelConfig) -> Self:
        return cls(config.allow_sync, strict=config.strict_sync)

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        found = [
            (where, f"`{what}`", why or self.allow.get(where) or self.allow.get(where.rpartition(".")[2], ""))
            for where, function, excuse in reachable_functions(module)
            for what, why in _syncs(anatomy, function, excuse)
        ]
        open_findings = [f"{where}: {what}" for where, what, why in found if not why]
        if open_findings and self.strict:
            listed = "\n".join(f"  {one}" for one in open_findings)
            raise PassMismatch(
                f"The pass '{self.name}' found host syncs in the training path:\n{listed}\n"
                "  to fix   rewrite the site with a pass or a hand edit, or allow it in the model's config with a reason."
            )
        excused = tuple(Hit(where, 0, f"{what}: {why}") for where, what, why in found if why)
        return Outcome(module, upstream=excused, notes=tuple(open_findings))


def _syncs(anatomy: Anatomy, function: FunctionNode, excuse: str) -> Iterator[tuple[str, str]]:
    """The syncing expressions of a function, in order, each with the reason why it does not run in training, if known.

    The eager path, below a seam's early return, is left out.
    """
    for part, why in statements_with_reasons(function, excuse):
        for node in walk(part):
            read = (test for test in _tests(node) if SYNCING_TESTS & anatomy.names.operations(test))
            yield from ((f"if {ast.unparse(test)}", why) for test in read)
            if isinstance(node, ast.Call) and _waits(anatomy, function, node):
                yield ast.unparse(node), why


def _tests(node: ast.AST) -> Iterator[ast.expr]:
    """The conditions of an `if`, `while`, `assert`, a conditional expression or a comprehension."""
    match node:
        case Condition(test) | ast.IfExp(test) | ast.Assert(test):
            yield test
        case ast.comprehension(ifs=conditions):
            yield from conditions


def _waits(anatomy: Anatomy, function: FunctionNode, call: ast.Call) -> bool:
    """Whether a call waits for the device: a tensor's method, `torch.nonzero`, or a helper of transformers' towers.

    Such helpers have a parameter `kwargs` and pop precomputed values from it; called without it, they read from the device.
    """
    meaning = anatomy.names.resolve(call.func, local_names(function))
    if meaning is None and isinstance(call.func, ast.Attribute):
        return call.func.attr in SYNCING_METHODS and not call.args
    if meaning in SYNCING_FUNCTIONS:
        return True
    helper = library_function(anatomy, meaning)
    names = parameter_names(helper) if helper is not None else []
    return "kwargs" in names and "kwargs" not in arguments(call, names)
