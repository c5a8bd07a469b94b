"""Finds operations in generated forwards that make the host wait for the device."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import calls, dotted
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
        Example(
            "reports, rewrites nothing",
            before="class ExampleTower(nn.Module):\n    def forward(self, x, lengths):\n        return x.split(lengths.tolist())\n",
            after="class ExampleTower(nn.Module):\n    def forward(self, x, lengths):\n        return x.split(lengths.tolist())\n",
        ),
    )

    def __init__(self, allow: Mapping[str, str] | None = None, *, strict: bool = False) -> None:
        self.allow, self.strict = dict(allow or {}), strict

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        del anatomy
        findings = []
        for block in module:
            if isinstance(block.node, ast.ClassDef):
                for node in block.node.body:
                    if isinstance(node, ast.FunctionDef) and node.name == "forward":
                        findings += [(f"{block.name}.forward", sync) for sync in _syncs(node)]
        open_findings = [f for f in findings if f[0] not in self.allow]
        if open_findings and self.strict:
            listed = "\n".join(f"  {where}: {what}" for where, what in open_findings)
            raise PassMismatch(
                f"The pass '{self.name}' found host syncs in the training path:\n{listed}\n"
                "  ways out rewrite the site with a pass or a hand edit, or allow it in the model's config with a reason."
            )
        allowed = tuple(
            Hit(where, 0, f"{what}: {self.allow[where]}") for where, what in findings if where in self.allow
        )
        return Outcome(module, upstream=allowed, notes=tuple(f"{where}: {what}" for where, what in open_findings))


def _syncs(forward: ast.FunctionDef) -> list[str]:
    """The syncing expressions of a forward, in order; below a seam's early return stands the eager path, not counted."""
    found = []
    for statement in forward.body:
        if _is_seam(statement):
            break
        for node in ast.walk(statement):
            if isinstance(node, ast.If | ast.While) and any(
                dotted(call.func).rpartition(".")[2] in SYNCING_TESTS and isinstance(call.func, ast.Attribute)
                for call in calls(node.test)
            ):
                found.append(f"`if {ast.unparse(node.test)}`")
            elif _is_syncing_call(node):
                found.append(f"`{ast.unparse(node)}`")
    return found


def _is_syncing_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in SYNCING_METHODS and not node.args


def _is_seam(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(dotted(call.func) == "ops.serves" for call in calls(statement.test))
