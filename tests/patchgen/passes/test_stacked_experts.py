"""Lists of experts become stacks: source before and after, forms of loop that are read, forms that are refused."""

from __future__ import annotations

import ast
import re
import textwrap
from types import SimpleNamespace

import pytest
import torch
from generation_cases import applied

from patchgen.anatomy import Role, study
from patchgen.anatomy.expert_lists import branch_of, read_expert_list, statement_at
from patchgen.errors import Missed
from patchgen.passes.base import Outcome
from patchgen.passes.fused_experts import FusedExperts
from patchgen.passes.parallel_plan import ParallelPlan
from patchgen.passes.stacked_experts import StackedExperts
from patchgen.pipeline import run_passes
from patchgen.source import Module, parse
from patchgen.upstream import Upstream

EXPERT = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN


class ToyMLP(nn.Module):
    def __init__(self, config, width=None):
        super().__init__()
        self.w1 = nn.Linear(config.hidden, width or config.size, bias=False)
        self.w2 = nn.Linear(width or config.size, config.hidden, bias=False)
        self.w3 = nn.Linear(config.hidden, width or config.size, bias=False)
        self.act_fn = ACT2FN[config.act]

    def forward(self, x):
        product = self.act_fn(self.w1(x)) * self.w3(x)
        product = self.w2(product)
        return product


class ToyMoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.gate = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = nn.ModuleList([ToyMLP(config, width=config.size) for _ in range(self.num_experts)])

"""
MODEL = """

class ToyModel(PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.moe = ToyMoE(config)
"""
ROUTE = """
    def forward(self, hidden_states):
        weights, selected = torch.topk(self.gate(hidden_states).softmax(-1), 2, dim=-1)
        return self.moe(hidden_states, selected, weights)
"""
HIT_LOOP = """
    def moe(self, hidden_states, selected, weights):
        tokens, hidden_dim = hidden_states.shape
        # the sum over experts
        total = torch.zeros((tokens, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device)
        # which expert has which token
        mask = F.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for number in hit:
            expert = self.experts[number]
            slot, token = torch.where(mask[number].squeeze(0))
            state = hidden_states[None, token].reshape(-1, hidden_dim)
            state = expert(state) * weights[token, slot, None]
            total.index_add_(0, token, state.to(hidden_states.dtype))
        return total
"""
RANGE_LOOP = """
    def moe(self, hidden_states, selected, weights):
        total = torch.zeros_like(hidden_states, dtype=weights.dtype)
        mask = F.one_hot(selected, num_classes=len(self.experts))
        mask = mask.permute(2, 0, 1)
        for number in range(len(self.experts)):
            expert = self.experts[number]
            of_expert = mask[number]
            token, slot = torch.where(of_expert)
            if token.numel() > 0:
                scale = weights[token, slot]
                rows = hidden_states[token]
                result = expert(rows)
                result = result * scale.unsqueeze(-1)
                total.index_add_(0, token, result)
        return total.type(hidden_states.dtype)
"""
ENUMERATED_LOOP = """
    def moe(self, hidden_states, selected, weights):
        total = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(selected == number)
            if token.shape[0] == 0:
                continue
            total[token] += weights[token, slot, None] * expert(hidden_states[token])
        return total
"""
SKIPPING_LOOP = """
    def moe(self, hidden_states, selected, weights):
        total = torch.zeros_like(hidden_states)
        mask = F.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        for number in range(self.num_experts):
            slot, token = torch.where(mask[number])
            if not mask[number].any():
                continue
            result = self.experts[number](hidden_states[token]) * weights[token, slot].unsqueeze(-1)
            total = total.index_add(0, token, result)
        return total
"""
LOOPS = {"hit": HIT_LOOP, "range": RANGE_LOOP, "enumerate": ENUMERATED_LOOP, "skipping": SKIPPING_LOOP}
CALLS = {
    "hit": "total = self.experts(hidden_states, selected, weights)",
    "range": "total = self.experts(hidden_states, selected, weights).to(weights.dtype)",
    "enumerate": "total = self.experts(hidden_states, selected, weights)",
    "skipping": "total = self.experts(hidden_states, selected, weights)",
}


def upstream_of(text: str) -> Upstream:
    module = "transformers.models.toy.modeling_toy"
    return Upstream("toy", text, origin="a text", version=None, module=module, path="modeling_toy.py")


def stack(text: str) -> Outcome:
    return applied(StackedExperts(), text)


def method_text(module: Module, block: str, method: str) -> str:
    text = module.block(block).text
    return textwrap.dedent(text[text.index(f"    def {method}(") :])


@pytest.mark.parametrize("form", LOOPS)
def test_loop_becomes_one_call(form):
    outcome = stack(EXPERT + LOOPS[form] + ROUTE + MODEL)
    assert [hit.site for hit in outcome.hits] == ["ToyMoE", "ToyModel._init_weights"]
    assert outcome.added == ("ToyMoEStackedExperts",)
    moe = method_text(outcome.module, "ToyMoE", "moe")
    assert CALLS[form] in moe
    for gone in ("for ", "one_hot", "zeros", "# which expert has which token", "# the sum"):
        assert gone not in moe
    built = "self.experts = ToyMoEStackedExperts(ToyMLP(config, width=config.size), num_experts=self.num_experts)"
    assert built in outcome.module.block("ToyMoE").text


@pytest.mark.parametrize("form", LOOPS)
def test_second_run_changes_nothing(form):
    once = stack(EXPERT + LOOPS[form] + ROUTE + MODEL).module.text
    twice = stack(once)
    assert twice.module.text == once
    assert not twice.hits and [hit.site for hit in twice.upstream] == ["ToyMoEStackedExperts.forward"]


def test_the_dtype_of_the_sum_is_what_its_zeros_are_by_whatever_name():
    def called(zeros: str) -> str:
        text = EXPERT + ENUMERATED_LOOP.replace("torch.zeros_like(", zeros) + ROUTE + MODEL
        return method_text(stack("from torch import zeros_like\n" + text).module, "ToyMoE", "moe")

    assert called("zeros_like(") == called("torch.zeros_like(") == called("torch.zeros_like(input=")


def test_what_something_else_reads_stays():
    text = EXPERT + HIT_LOOP.replace("return total", "return total, mask.sum()") + ROUTE + MODEL
    moe = method_text(stack(text).module, "ToyMoE", "moe")
    assert "mask = F.one_hot(" in moe and "hit = " not in moe


def test_what_is_read_below_the_branch_of_a_loop_stays():
    head, body = HIT_LOOP.split("        tokens, hidden_dim")
    branch = textwrap.indent("        tokens, hidden_dim" + body.replace("        return total\n", ""), "    ")
    loop = f"{head}        if self.num_experts:\n{branch}        return total, mask.sum()\n"
    moe = method_text(stack(EXPERT + loop + ROUTE + MODEL).module, "ToyMoE", "moe")
    assert "mask = F.one_hot(" in moe and "hit = " not in moe


def test_fused_experts_and_parallel_plan_see_the_new_class(default_config):
    head = (
        "from transformers import GenerationMixin\n\n\nclass ToyForCausalLM(ToyModel, GenerationMixin):\n"
        "    def forward(self, input_ids=None, labels=None):\n"
        "        return self.loss_function(self.moe(input_ids), labels, 8)\n"
    )
    text = EXPERT + HIT_LOOP + ROUTE + MODEL + head
    module = parse(text)
    anatomy = study(module, upstream_of(text))
    before = {name: info.node.lineno for name, info in anatomy.classes.items()}
    steps = run_passes(module, anatomy, (StackedExperts(), FusedExperts(), ParallelPlan()), default_config)
    final = steps[-1].outcome.module
    assert [hit.site for hit in steps[1].outcome.hits] == ["ToyMoEStackedExperts.forward"]
    assert "return ops.fused_moe(" in final.block("ToyMoEStackedExperts").text
    assert 'experts={"ToyMoEStackedExperts": ("gate_up_proj", "down_proj")}' in final.block("ToyForCausalLM").text
    assert {name: anatomy.classes[name].node.lineno for name in before} == before
    assert Role.EXPERTS in anatomy.classes["ToyMoEStackedExperts"].roles
    assert "ToyMoEStackedExperts" in anatomy.reached_from(["ToyForCausalLM"])


@pytest.mark.parametrize(
    "taken",
    [
        "class ToyMoEStackedExperts(nn.Module):\n    pass\n",
        "from transformers.activations import ACT2CLS as ToyMoEStackedExperts\n",
        "ToyMoEStackedExperts = None\n",
    ],
)
def test_a_name_that_the_file_has_is_not_taken(taken: str):
    outcome = stack(EXPERT + HIT_LOOP + ROUTE + MODEL + f"\n\n{taken}")
    assert outcome.added == ("ToyMoEStackedExperts_",)


def test_biases_are_stacked_too():
    text = (EXPERT + HIT_LOOP + ROUTE + MODEL).replace(", bias=False)\n        self.w", ")\n        self.w")
    text = text.replace(", bias=False)\n        self.act_fn", ")\n        self.act_fn")
    stacks = stack(text).module.block("ToyMoEStackedExperts").text
    assert "self.gate_up_proj_bias[expert_idx]" in stacks and "self.down_proj_bias[expert_idx]" in stacks


def test_a_file_that_imports_torch_otherwise_gets_what_the_new_class_is_written_with():
    text = EXPERT.replace("from torch import nn\n", "import torch.nn as tnn\n") + HIT_LOOP + ROUTE + MODEL
    text = re.sub(r"\bnn\.(?=[A-Z])", "tnn.", text)
    assert "\nfrom torch import nn\n" in stack(text).module.text


def test_bias_that_a_config_decides_is_refused_when_it_is_there():
    text = (EXPERT + HIT_LOOP + ROUTE + MODEL).replace(
        "bias=False)\n        self.w", "bias=config.bias)\n        self.w"
    )
    text = text.replace("bias=False)\n        self.act_fn", "bias=config.bias)\n        self.act_fn")
    assert "if expert.w1.bias is not None:\n            raise ValueError(" in stack(text).module.text


INIT = {
    "in place": "if isinstance(module, nn.Linear):\n            module.weight.data.normal_(mean=1.0, std=0.02)\n",
    "by a function": "if isinstance(module, nn.Linear):\n            nn.init.constant_(module.weight, 1.0)\n",
    "by the shape": "if isinstance(module, nn.Linear):\n            module.weight.data.fill_(module.weight.shape[0] / 6)\n",
}


@pytest.mark.parametrize("case", INIT)
def test_each_slice_starts_as_a_linear_layer_does(case):
    model = MODEL + f"\n    def _init_weights(self, module):\n        {INIT[case]}"
    space: dict = {"ops": SimpleNamespace(register_stacked_experts=lambda *names, experts: None)}
    exec(stack(EXPERT + HIT_LOOP + ROUTE + model).module.text, space)
    config = SimpleNamespace(hidden=6, size=6, act="silu", num_experts=3)
    stacks = space["ToyMoEStackedExperts"](space["ToyMLP"](config), num_experts=3)
    torch.nn.init.constant_(stacks.down_proj, 9.0)
    stacks.down_proj._is_hf_initialized = True  # as from a checkpoint
    space["ToyModel"]._init_weights(SimpleNamespace(_init_weights=lambda one: initialise(space, one)), stacks)
    assert stacks.gate_up_proj.shape == (3, 12, 6) and (stacks.gate_up_proj - 1).abs().max() < 0.2
    assert (stacks.down_proj == 9).all()


def initialise(space: dict, module) -> None:
    space["ToyModel"]._init_weights(SimpleNamespace(), module)


OTHERS = {
    "the weight goes into the expert": ("expert(state) * weights[token, slot, None]", "expert(state, weights[token])"),
    "slot and token are swapped": ("slot, token = torch.where(mask", "token, slot = torch.where(mask"),
    "the expert's output is clamped": ("total.index_add_", "state = state.clamp(-1, 1)\n            total.index_add_"),
    "the first token alone left out": (
        "state = hidden",
        "if not token.any():\n                continue\n            state = hidden",
    ),
    "a capacity": ("state = hidden", "if token.numel() > 64:\n                continue\n            state = hidden"),
    "another choice in the loop": ("for number in hit:", "for number in self.favourites:"),
    "not a sum over experts": ("total.index_add_(0, token", "total.index_copy_(0, token"),
    "the sum starts elsewhere": ("total = torch.zeros(", "total = torch.ones("),
    "tokens chosen from new values": ("        hit =", "        selected = selected.flip(-1)\n        hit ="),
    "a value of the loop lives on": ("return total", "return total + state.sum()"),
    "experts of different widths": (
        "[ToyMLP(config, width=config.size) for _ in",
        "[ToyMLP(config, width=config.size + i) for i in",
    ),
    "experts inside another module": (
        "[ToyMLP(config, width=config.size) for _ in",
        "[nn.Sequential(ToyMLP(config, width=config.size)) for _ in",
    ),
    "experts beside the list": (
        "for _ in range(self.num_experts)])",
        "for _ in range(self.num_experts)] + [nn.Identity()])",
    ),
    "a part of the experts": ("for number in hit:", "for number in range(self.top_k):"),
    "a use beside the loop": ("return total", "return total + self.experts[0](hidden_states)"),
    "a function of the file that is called range": (
        "class ToyMLP(nn.Module):",
        "def range(stop):\n    return reversed([*iter(int, 1)][:stop])\n\n\nclass ToyMLP(nn.Module):",
    ),
    "an expert that does more": ("product = self.w2(product)", "product = self.w2(product) + x"),
}


def require_left(text: str, why: str = "") -> None:
    outcome = stack(text)
    assert not outcome.hits and outcome.module.text == text
    assert len(outcome.notes) == 1
    assert (
        outcome.notes[0].startswith("ToyMoE: experts of no known form, left as they are") and why in outcome.notes[0]
    )


@pytest.mark.parametrize("case", OTHERS)
def test_another_form_stays_as_it_is_and_is_told(case):
    old, new = OTHERS[case]
    text = EXPERT + HIT_LOOP + ROUTE + MODEL
    assert text.count(old) == 1
    require_left(text.replace(old, new))


def test_a_list_under_two_names_stays():
    """The second name would be lost."""
    text = (EXPERT + HIT_LOOP + ROUTE + MODEL).replace("self.experts = nn.", "self.experts = self.shadow = nn.")
    require_left(text, "found self.experts = self.shadow = nn")


def test_a_place_leads_through_branches_within_branches():
    body = ast.parse("a\nif b:\n    c\nelse:\n    if d:\n        e\n    else:\n        f\n        g").body
    assert ast.unparse(statement_at(body, (1, 1, 0, 1, 1))) == "g"
    assert [ast.unparse(one) for one in branch_of(body, (1, 1, 0, 0, 0))] == ["e"]


def test_two_lists_in_one_block_are_a_miss():
    second = "        self.more = nn.ModuleList([ToyMLP(config) for _ in range(4)])\n"
    text = EXPERT.rstrip() + "\n" + second + HIT_LOOP + ROUTE + MODEL
    anatomy = study(parse(text), upstream_of(text))
    with pytest.raises(Missed) as caught:
        read_expert_list(anatomy, anatomy.classes["ToyMoE"])
    assert "['experts', 'more']" in caught.value.found


@pytest.fixture
def default_config():
    from patchgen.model_configs import config_for

    return config_for("toy")
