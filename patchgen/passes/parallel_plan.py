"""Heads get a method that reports their expert parameters, which the anatomy finds."""

from __future__ import annotations

from collections.abc import Sequence

from patchgen.anatomy import Anatomy, ClassInfo, Role
from patchgen.anatomy.experts import other_reader, read_experts
from patchgen.anatomy.roles import left_alone_experts
from patchgen.passes.base import Example, Rewritten, Site, SitePass
from patchgen.rewrite import append_method
from patchgen.source import Block, Module

Experts = dict[str, tuple[tuple[str, ...], str]]  # class -> its stacked parameters, and what else reads them, or ""


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
        return super().why(info, anatomy) or info.roles.get(Role.ASKED, "")

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        read = _experts(anatomy, site.block)
        experts = {name: stacks for name, (stacks, reader) in read.items() if not reader}
        header = "def get_parallel_plan(self) -> ops.ParallelPlan:"
        alone = _left_alone(anatomy, site.block, read)
        left_alone = f", left_alone={alone!r}" if alone else ""
        code = f"{header}\n    return ops.parallel_plan(self, experts={experts!r}{left_alone})"
        listed = ", ".join(f"{name}: {len(parameters)} parameters" for name, parameters in experts.items())
        return Rewritten(append_method(block, code, self.mark), listed or "no experts")

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        reasons: dict[str, str] = {}
        for head in anatomy.with_role(Role.HEAD, module):
            reasons |= _left_alone(anatomy, head.name, _experts(anatomy, head.name))
        return [f"{name}: {why}: not expert-parallel" for name, why in reasons.items()]


def _left_alone(anatomy: Anatomy, head: str, read: Experts) -> dict[str, str]:
    """The experts below a head that are not sharded, each with the reason."""
    reasons = {name: f"{reader}, of which a rank would hold a part" for name, (_, reader) in read.items() if reader}
    below = anatomy.reached_from([head])
    return reasons | {name: sign for name, sign in left_alone_experts(anatomy).items() if name in below}


def _experts(anatomy: Anatomy, head: str) -> Experts:
    """The experts below a head: their stacked parameters, and what reads these other than the experts' forward."""
    below, experts = anatomy.reached_from([head]), Experts()
    for info in (expert_class for expert_class in anatomy.with_role(Role.EXPERTS) if expert_class.name in below):
        formula = read_experts(anatomy, info.name)
        names = (formula.gate_up_weight, formula.gate_up_bias, formula.down_weight, formula.down_bias)
        stacks = tuple(name for name in names if name)
        experts[info.name] = stacks, other_reader(anatomy, info.name, stacks, below)
    return experts
