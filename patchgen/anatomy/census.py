"""Which classes and functions on the path from a head's inputs to its loss a pass covers.

The others compute as upstream wrote them: attention by the interface of transformers, routers, positions, and all that no pass
knows. Which lines of the file no proof ran is recorded by the proof (`not_run` in verify.json).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from patchgen.anatomy.classes import walk
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.imported import imported_code
from patchgen.anatomy.roles import INTERFACE, Role, left_alone_experts
from patchgen.source import Module

COVERED = "passes"
UPSTREAM = "as upstream wrote it"
ELSEWHERE = "another file's"
PART = "a generated file of its own, which the config chooses"
EXPERTS = "experts left alone"
EAGER = "attention: upstream's eager form"
ROLES = {Role.ROTARY: "positions", Role.ROUTER: "a router", Role.ATTENTION: "attention"}


def census(
    anatomy: Anatomy, module: Module, heads: Iterable[str], hits: Mapping[str, Iterable[str]]
) -> dict[str, str]:
    """Name -> the passes that rewrote it, or why it is left alone, in the order of the file; then what is of other files.

    Args:
        module: the file after the passes: what they dropped is not on the path.
        hits: class or function -> the passes that rewrote it, or found that upstream already does their work there.
    """
    reached = anatomy.reached_from(heads)
    reasons: dict[str, str] = {}
    experts, eager = left_alone_experts(anatomy), _eager_functions(anatomy)
    for block in module:
        name = block.name or ""
        is_module = name in reached and anatomy.method(name, "forward") is not None
        if not is_module and name not in anatomy.functions:
            continue
        names = [info.name for info in anatomy.lineage(name)] or [name]  # a function has no lineage
        if passes := dict.fromkeys(pass_name for part in names for pass_name in hits.get(part, ())):
            reasons[name] = f"{COVERED}: {', '.join(passes)}"
        elif name in experts:
            reasons[name] = f"{EXPERTS}: {experts[name]}"
        else:
            reasons[name] = EAGER if name in eager else _by_role(anatomy, name)
    for info in anatomy.still_in(module):
        for build in anatomy.auto_builds(info.name) if info.name in reached else ():
            target = anatomy.target_of(build)
            if target and target not in anatomy.classes:
                reasons.setdefault(target, PART if anatomy.is_part(build) else ELSEWHERE)
    return reasons | {f"{part.module}.{part.name}": ELSEWHERE for part in imported_code(anatomy, module)}


def summary(reasons: Mapping[str, str]) -> str:
    """The census as one line: how many classes and functions passes rewrote, and the names of the others by reason."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason.split(":")[0], []).append(name)
    covered = groups.pop(COVERED, [])
    listed = "".join(f"; {reason}: {', '.join(names)}" for reason, names in sorted(groups.items()))
    return f"{len(covered)} of {len(reasons)} classes and functions on the way to the loss in passes{listed}"


def _by_role(anatomy: Anatomy, name: str) -> str:
    roles = anatomy.classes[name].roles if name in anatomy.classes else {}
    for role, reason in ROLES.items():
        if role in roles:
            return f"{reason}: {roles[role]}" if role == Role.ATTENTION else reason
    return UPSTREAM


def _eager_functions(anatomy: Anatomy) -> set[str]:
    """The functions that classes hand to transformers' attention interface: a run replaces them by the attention it chooses."""
    calls = (node for info in anatomy.classes.values() for node in walk(info.node) if isinstance(node, ast.Call))
    asked = (
        call for call in calls if (anatomy.names.resolve(call.func) or "").endswith(f".{INTERFACE}.get_interface")
    )
    return {ast.unparse(argument) for call in asked for argument in call.args}
