"""Inserts an `ops.fused_moe(...)` seam into the experts' forward; upstream's loop stays below it as the eager path."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.experts import ExpertsFormula, read_experts
from patchgen.anatomy.imported import imported_code
from patchgen.anatomy.roles import DISPATCHER, left_alone_experts
from patchgen.errors import LeftAlone
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import Editor, format_code
from patchgen.source import Block, Module

REGISTER, OUR_REGISTER = "experts_interface", "ops.experts_interface"  # the decorator's parameter; our argument for it


class FusedExperts(SitePass):
    """Upstream's decorator runs the implementation that the config's `experts_implementation` names; by default that is
    not the class's own forward, which has the seam. So it gets our registry, which chooses the forward if the seam serves."""

    name = "fused_experts"
    purpose = "The experts' forward becomes one ops.fused_moe seam; upstream's loop stays as the eager path."
    expects = "one hit per stacked experts class of a known form; others are listed as notes"
    role = Role.EXPERTS
    EXAMPLES = (
        Example("""gated experts; upstream's dispatching decorator asks our register
      - @use_experts_implementation
      + @use_experts_implementation(experts_interface=ops.experts_interface)
        class ExampleExperts(nn.Module):
            def __init__(self, config):
                self.num_experts = config.num_experts
                self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * config.size, config.hidden))
                self.down_proj = nn.Parameter(torch.empty(self.num_experts, config.hidden, config.size))
                self.act_fn = ACT2FN[config.hidden_act]

            def forward(self, hidden_states, top_k_index, top_k_weights):
      +         # patchgen: fused_experts
      +         if ops.serves("fused_moe"):
      +             return ops.fused_moe(
      +                 hidden_states,
      +                 top_k_index,
      +                 top_k_weights,
      +                 self.gate_up_proj,
      +                 self.down_proj,
      +                 num_experts=self.num_experts,
      +                 activation=self.act_fn,
      +             )
                final_hidden_states = torch.zeros_like(hidden_states)
                expert_mask = F.one_hot(top_k_index, num_classes=self.num_experts).permute(2, 1, 0)
                for expert_idx in expert_mask.sum(dim=(-1, -2)).nonzero():
                    expert_idx = expert_idx[0]
                    top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
                    current_state = hidden_states[token_idx]
                    gate, up = F.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
                    current_state = F.linear(self.act_fn(gate) * up, self.down_proj[expert_idx])
                    current_state = current_state * top_k_weights[token_idx, top_k_pos, None]
                    final_hidden_states.index_add_(0, token_idx, current_state)
                return final_hidden_states
        """),
    )

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        signs = [(name, sign) for name, sign in left_alone_experts(anatomy).items() if module.has(name)]
        notes = [f"{name} {sign}: experts of another kind, left as they are" for name, sign in signs]
        for part in imported_code(anatomy, module):
            other = part.anatomy or Anatomy(anatomy.upstream)
            reached = sorted(other.reached_from([part.name]))
            names = [name for name in reached if {Role.EXPERTS, Role.EXPERT_LIST} & set(other.classes[name].roles)]
            notes += [f"{part.use}, which has the experts {name}: left as they are" for name in names]
        return notes

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        editor = Editor(block, self.mark)
        try:
            formula = read_experts(anatomy, site.block)
            for decorator in getattr(block.node, "decorator_list", ()):
                if anatomy.names.is_upstream(getattr(decorator, "func", decorator), DISPATCHER):
                    editor.instead(decorator, _with_our_register(decorator))
        except Missed as miss:
            raise LeftAlone(f"{site.block}: experts of no known form, left as they are: {miss}") from miss
        editor.at_start(editor.function("forward"), fused_call(formula))
        return Rewritten(editor.result, "fused_moe seam")


def fused_call(formula: ExpertsFormula) -> str:
    """The source of the seam for experts of this formula."""
    options = {
        "num_experts": formula.num_experts,
        "activation": formula.activation and f"self.{formula.activation}",
        "apply_gate": formula.apply_gate and f"self.{formula.apply_gate}",
        "gate_up_bias": formula.gate_up_bias and f"self.{formula.gate_up_bias}",
        "down_bias": formula.down_bias and f"self.{formula.down_bias}",
        "is_gated": None if formula.is_gated else "False",
        "is_transposed": "True" if formula.is_transposed else None,
        "post_expert_norm": formula.post_norm and f"self.{formula.post_norm}",
    }
    arguments = [
        formula.hidden_states,
        formula.top_k_index or "None",
        formula.top_k_weights or "None",
        f"self.{formula.gate_up_weight}",
        f"self.{formula.down_weight}",
        *(f"{name}={value}" for name, value in options.items() if value),
    ]
    return f'if ops.serves("fused_moe"):\n    return ops.fused_moe({", ".join(arguments)})\n'


def _with_our_register(decorator: ast.expr) -> str:
    """The source of the dispatching decorator with our registry of implementations. Raises Missed if it has another
    registry."""
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in getattr(decorator, "keywords", ())}
    name = ast.unparse(getattr(decorator, "func", decorator))
    if given.setdefault(REGISTER, OUR_REGISTER) != OUR_REGISTER:
        raise Missed(f"@{DISPATCHER} with transformers' own register", f"@{ast.unparse(decorator)}")
    order = dict.fromkeys([REGISTER, *given])
    return format_code(f"{name}({', '.join(f'{name}={given[name]}' for name in order)})").strip()
