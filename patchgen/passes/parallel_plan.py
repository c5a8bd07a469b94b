"""Heads get a method that reports their expert parameters, which the anatomy finds."""

from __future__ import annotations

from collections.abc import Sequence

from patchgen.anatomy import Anatomy, ClassInfo, Role
from patchgen.anatomy.expert_lists import expert_lists, read_expert_list
from patchgen.anatomy.experts import read_experts
from patchgen.anatomy.roles import left_alone_experts
from patchgen.errors import Missed
from patchgen.passes.base import Example, Rewritten, Site, SitePass
from patchgen.rewrite import append_method
from patchgen.source import Block, Module


class ParallelPlan(SitePass):
    """The plan lists the stacked parameters that the experts' forward reads."""

    name = "parallel_plan"
    purpose = "Each head reports which parameters carry the expert dimension."
    expects = "one hit per causal head, or per head asked for"
    role = Role.HEAD
    member = ""
    EXAMPLES = (
        Example("""a head without experts below it
        class ExampleForCausalLM(ExamplePreTrainedModel, GenerationMixin):
            def forward(self, input_ids, labels=None):
                return self.loss_function(self.lm_head(self.model(input_ids)), labels, self.vocab_size)
      +
      +     # patchgen: parallel_plan
      +     def get_parallel_plan(self) -> ops.ParallelPlan:
      +         return ops.parallel_plan(self, experts={})
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        if info.name not in anatomy.own_heads():
            return info.roles.get(Role.ASKED, "")
        return super().why(info, anatomy) or f"{self.role}: by inheritance"

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        experts, alone = _experts(anatomy, site.block)
        header = "def get_parallel_plan(self) -> ops.ParallelPlan:"
        left_alone = f", left_alone={alone!r}" if alone else ""
        code = f"{header}\n    return ops.parallel_plan(self, experts={experts!r}{left_alone})"
        listed = ", ".join(f"{name}: {len(parameters)} parameters" for name, parameters in experts.items())
        return Rewritten(append_method(block, code, self.mark), listed or "no experts")

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        reasons: dict[str, str] = {}
        for head in filter(module.has, anatomy.own_heads()):
            reasons |= _experts(anatomy, head)[1]
        return [f"{name}: {why}: not expert-parallel" for name, why in reasons.items()]


def _experts(anatomy: Anatomy, head: str) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The experts below a head: class -> stacked parameters, and those that are not sharded, each with the reason."""
    below = anatomy.reached_from([head])
    experts, alone = dict[str, tuple[str, ...]](), dict[str, str]()
    for info in (info for info in anatomy.classes.values() if info.name in below):
        try:
            if Role.EXPERTS in info.roles:
                formula = read_experts(anatomy, info.name)
                names = (formula.gate_up_weight, formula.gate_up_bias, formula.down_weight, formula.down_bias)
                experts[info.name] = tuple(name for name in names if name)
            elif Role.EXPERT_LIST in info.roles and expert_lists(anatomy, info):  # one that was not stacked
                read_expert_list(anatomy, info)
        except Missed as miss:
            alone[info.name] = f"experts of no known form: {miss}"
    return experts, alone | {name: sign for name, sign in left_alone_experts(anatomy).items() if name in below}
