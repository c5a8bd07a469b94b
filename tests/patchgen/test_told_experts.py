"""Experts of another formula, hooked or read elsewhere: the proof tells each, or they compute what upstream's do."""

from __future__ import annotations

import pytest
from changed_sources import ACTIVATED, ADDED, GATE_UP, HIT, ZEROS, SourceChange, changed
from judged import EQUAL, TOLD, judged

from patchgen.runtime.verify import told
from patchgen.runtime.verify.ranks import RankPool

ACT = "        self.act_fn = ACT2FN[config.hidden_act]\n\n    def forward(\n"
BUILT = "        self.experts = Qwen3MoeExperts(config)\n"
CLASS = "@use_experts_implementation\n"
CALL = "final_hidden_states = self.experts(hidden_states_reshaped, selected_experts, routing_weights)\n"
WEIGHTED = "            current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]\n"
DOWN = "self.down_proj[expert_idx])"


def experts(title: str, *edits: tuple[str, str]) -> SourceChange:
    return changed("fused_experts", "qwen3_moe", title, *edits)


def held(code: str) -> tuple[str, str]:
    """Code in the experts' `__init__`."""
    return ACT, ACT.replace("\n\n", f"\n        {code}\n\n", 1)


def around(title: str, code: str, *edits: tuple[str, str]) -> SourceChange:
    """Code in the block that has the experts."""
    return experts(title, (BUILT, f"{BUILT}        {code}\n"), *edits)


QUICK = (
    experts("activation on the other half", (ACTIVATED, "current_hidden_states = gate * self.act_fn(up)")),
    experts("no routing weight", (WEIGHTED, "")),
)
LATER = (
    experts("a sum for the product", (ACTIVATED, "current_hidden_states = self.act_fn(gate) + up")),
    experts("scaled in place", (ACTIVATED, f"{ACTIVATED}\n            current_hidden_states *= 2.0")),
    experts("scaled in training", (ACTIVATED, f"{ACTIVATED}\n            if self.training:\n                current_hidden_states = current_hidden_states * 2")),
    experts("scaled before the loop", (ZEROS, f"hidden_states = hidden_states * 2\n        {ZEROS}")),
    experts("the choice sorted before the loop", (ZEROS, f"{ZEROS}\n        top_k_index, order = top_k_index.sort()")),
    experts("a capacity", (HIT, f"expert_mask[:, :, self.capacity :] = 0\n            {HIT}"), held("self.capacity = 5")),
    experts("frozen experts", ("if expert_idx == self.num_experts:", "if expert_idx == self.num_experts or expert_idx in self.frozen:"), held("self.frozen = (1,)")),
    experts("a sum that begins with the tokens", (ZEROS, ZEROS.replace("torch.zeros_like(hidden_states)", "hidden_states.clone()"))),
    experts("ones for zeros", (ZEROS, ZEROS.replace("zeros_like", "ones_like"))),
    experts("other tokens", ("hidden_states[token_idx]", "hidden_states[token_idx.flip(0)]")),
    experts("another expert's weight", (DOWN, DOWN.replace("expert_idx", "expert_idx - 1"))),
    experts("rounded tokens", ("hidden_states[token_idx]", "hidden_states[token_idx].to(torch.bfloat16).to(hidden_states.dtype)")),
    experts("every second column", (GATE_UP, "gate_up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx])\n            gate, up = gate_up[..., ::2], gate_up[..., 1::2]")),
    experts("a bias of all experts", (DOWN, f"{DOWN[:-1]}, self.shared_bias)"), held("self.shared_bias = nn.Parameter(torch.ones(config.hidden_size))")),
    experts("assignment for addition", (ADDED, "final_hidden_states[token_idx] = current_hidden_states")),
    experts("added twice", (ADDED, f"{ADDED}\n            {ADDED}")),
)  # fmt: skip


@pytest.mark.parametrize(
    "change", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in LATER)], ids=lambda one: one.title
)
def test_another_formula_is_told(change: SourceChange):
    """The class is decorated: upstream's own kernels, which the proof runs beside its loop, compute the usual formula."""
    found = judged(change)
    assert (found.kind, found.by) == (TOLD, told.PROOF), found


SAME = (
    experts("an early return without tokens", (ZEROS, f"{ZEROS}\n        if top_k_index.numel() == 0:\n            return hidden_states")),
    experts("a product in fp32", (DOWN, "self.down_proj[expert_idx].float()).to(hidden_states.dtype)"), ("nn.functional.linear(current_hidden_states,", "nn.functional.linear(current_hidden_states.float(),")),
    experts("an activation among the modules", held("self._modules['act_fn'] = nn.Tanh()")),
    experts("an activation assigned twice", held("self.act_fn = nn.Tanh()")),
    experts("a table of the same name", (CLASS, f"ACT2FN = {{'silu': nn.Tanh()}}\n\n\n{CLASS}")),
    around("a hook", "self.experts.register_forward_hook(lambda module, given, made: made * 2)"),
    around("a hook on the activation", "self.experts.act_fn.register_forward_hook(lambda module, given, made: made * 2)"),
    around("another forward", "run = self.experts.forward\n        self.experts.forward = lambda *given: run(*given) * 2"),
    around("another class", "self.experts.__class__ = Twice", ("class Qwen3MoeSparseMoeBlock", "class Twice(Qwen3MoeExperts):\n    def forward(self, *given):\n        return super().forward(*given) * 2\n\n\nclass Qwen3MoeSparseMoeBlock")),
)  # fmt: skip


@pytest.mark.slow  # two ranks
@pytest.mark.parametrize("change", SAME, ids=lambda change: change.title)
def test_what_the_call_of_experts_still_runs_is_equal(change: SourceChange, two_ranks: RankPool):
    found = judged(change, pool=two_ranks)
    assert found.kind == EQUAL, found


def penalty(title: str, code: str, *edits: tuple[str, str]) -> SourceChange:
    """A read of the stacks outside of the experts, of which a rank has a part."""
    return experts(title, (CALL, f"{CALL}        final_hidden_states = final_hidden_states + {code}\n"), *edits)


MLP = "        hidden_states = self.mlp(hidden_states)\n"
READS = (
    penalty("by another name", "(lambda stacks: stacks.down_proj.square().mean())(self.experts)"),
    penalty("all parameters", "sum(one.square().mean() for one in self.experts.parameters())"),
    penalty("by its path", 'self.get_parameter("experts.gate_up_proj").square().mean()'),
    penalty("by a computed name", 'getattr(self.experts, "down_" + "proj").square().mean()'),
    penalty("by a dictionary", 'vars(self.experts)["_parameters"]["down_proj"].square().mean()'),
    penalty("by a getter", 'operator.attrgetter("experts.down_proj")(self).square().mean()', ("import torch\n", "import operator\n\nimport torch\n")),
    experts("by a layer", (MLP, f"        penalty = sum(one.square().mean() for one in self.mlp.parameters())\n{MLP}        hidden_states = hidden_states + penalty\n")),
)  # fmt: skip


@pytest.mark.slow  # two ranks
@pytest.mark.parametrize("change", READS, ids=lambda change: change.title)
def test_a_read_of_the_stacks_elsewhere_is_told_on_two_ranks(change: SourceChange, two_ranks: RankPool):
    found = judged(change, pool=two_ranks)
    assert (found.kind, found.by) == (TOLD, told.TWO_RANKS), found
