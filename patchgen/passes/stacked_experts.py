"""Experts are stacks `gate_up_proj [E, 2I, H]`, `down_proj [E, H, I]`."""

from __future__ import annotations

from collections.abc import Sequence

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.experts import Unread, read_experts
from patchgen.passes.base import Missed, Rewritten, Site, SitePass, Upstream, method_site
from patchgen.source import Block, Module


class StackedExperts(SitePass):
    """Stacks are what one grouped kernel and one sharded dimension need; upstream has them in most files by now."""

    name = "stacked_experts"
    purpose = "Experts are stacked weights; lists of expert modules become stacks."
    expects = "one hit per list of experts; experts that upstream stacks are upstream's"
    EXAMPLES = ()

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        roles = (Role.EXPERTS, Role.EXPERT_LIST)
        return [
            method_site(anatomy, info.name, "forward", f"{role}: {info.roles[role]}")
            for role in roles
            for info in anatomy.with_role(role, module)
        ]

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | Upstream | Missed:
        info = anatomy.classes[site.block]
        if Role.EXPERTS in info.roles:
            formula = read_experts(info.methods["forward"])
            if isinstance(formula, Unread):
                return Missed(formula.expected, formula.found)
            if formula.is_transposed:
                return Upstream(
                    "stacked as [E, H, 2I] and [E, I, H]; kernels take both layouts, checkpoints none converted"
                )
            return Upstream("stacked as [E, 2I, H] and [E, H, I]")
        return Missed("stacked weights", "")
