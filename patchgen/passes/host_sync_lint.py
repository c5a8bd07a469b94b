"""Finds operations in generated forwards that make the host wait for the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import FunctionNode, calls, dotted
from patchgen.anatomy.training_path import Test, parts, training_functions
from patchgen.errors import PassMismatch
from patchgen.passes.base import Example, Hit, Outcome, Pass
from patchgen.source import Module

SYNCING_METHODS = ("item", "tolist", "nonzero", "cpu", "numpy")
SYNCING_TESTS = ("any", "all")


class HostSyncLint(Pass):
    """A `.item()` in a layer costs a stall per layer and step, and reads like any other line."""

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

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        found = [
            (where, f"`{what}`", why or self.allow.get(where) or self.allow.get(where.rpartition(".")[2], ""))
            for where, function, excuse in training_functions(module)
            for what, why in _syncs(function, excuse)
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


def _syncs(function: FunctionNode, excuse: str) -> Iterator[tuple[str, str]]:
    """The syncing expressions of a function, in order, each with why it does not run in training, if the code tells.

    Below a seam's early return stands the eager path, not counted.
    """
    for part, why in parts(function, excuse):
        if isinstance(part, Test) and any(
            dotted(call.func).rpartition(".")[2] in SYNCING_TESTS and isinstance(call.func, ast.Attribute)
            for call in calls(part)
        ):
            yield f"if {ast.unparse(part.body)}", why
        for node in ast.walk(part):
            if _is_syncing_call(node):
                yield ast.unparse(node), why


def _is_syncing_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name) and _is_upstream_helper(node.func.id):
        return not any(keyword.arg == "kwargs" for keyword in node.keywords)
    return isinstance(node.func, ast.Attribute) and node.func.attr in SYNCING_METHODS and not node.args


def _is_upstream_helper(name: str) -> bool:
    """Helpers that transformers shares among towers: they read grids on the host unless `kwargs` brings the result."""
    return name.startswith("get_vision_") or name == "get_max_seqlen"
