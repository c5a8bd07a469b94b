"""Experts that are handed their rows of all choices, as DeepSeek's modeling file and those after it have them: before and
after compute the same, and what is not that form stays as it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from generation_cases import applied

from patchgen.passes.stacked_experts import StackedExperts
from patchgen.runtime import ops

BEFORE = """
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers.activations import ACT2FN


class ToyMLP(nn.Module):
    def __init__(self, config, width):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, width, bias=False)
        self.up_proj = nn.Linear(config.hidden, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden, bias=False)
        self.act_fn = ACT2FN["silu"]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ToyMoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.top_k = config, config.top_k
BUILT
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)
METHOD
    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        weights, chosen = torch.topk(self.gate(hidden_states).float().softmax(-1), self.top_k, dim=-1)
        flat = chosen.view(-1)
        if self.training:
            hidden_states = hidden_states.repeat_interleave(self.top_k, dim=0)
            y = torch.empty_like(hidden_states)
            for i, expert in enumerate(self.experts):
                y[flat == i] = expert(hidden_states[flat == i])
            y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
            y = y.to(hidden_states.dtype).view(*shape)
        else:
            y = self.infer(hidden_states, chosen, weights).view(*shape)
        return y

    @torch.no_grad()
    def infer(self, x, chosen, weights):
        counts = chosen.new_zeros((chosen.shape[0], len(self.experts)))
        counts.scatter_(1, chosen, 1)
        tokens_per_expert = counts.sum(dim=0)
        order = chosen.view(-1).argsort()
        ordered = x[order // chosen.shape[1]]
PARALLEL        tokens_per_expert = tokens_per_expert.cpu().numpy()
        outputs = []
        start = 0
        for i, number in enumerate(tokens_per_expert):
            end = start + number
            if number == 0:
                continue
            expert = self.experts[INDEX]
            made = expert(ordered[start:end])
            outputs.append(made.to(x.device))
            start = end
        made = torch.cat(outputs, dim=0) if len(outputs) else ordered.new_empty(0)
        back = torch.empty_like(made)
        back[order] = made
        return (
            back.view(*chosen.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1)).sum(dim=1).type(back.dtype)
        )
"""
LIST = "self.experts = nn.ModuleList([ToyMLP(config, width=config.width) for i in range(config.experts)])"
HELPER = f"""
    def _setup(self):
        config = self.config
        {LIST}
"""
BRANCHES = f"""
        if hasattr(config, "ep_size") and config.ep_size > 1:
            self.ep_size, self.ep_rank = config.ep_size, dist.get_rank()
            self.ep_size = config.ep_size
            self.ep_rank = dist.get_rank()
            self.experts = nn.ModuleList(
                [ToyMLP(config, width=config.width) if i == self.ep_rank else None for i in range(config.experts)]
            )
        else:
            self.ep_size = 1
            self.ep_rank = 0
            {LIST}
""".replace("            self.ep_size, self.ep_rank = config.ep_size, dist.get_rank()\n", "")
PARALLEL = """        if self.ep_size > 1:
            counts_of_all = tokens_per_expert.new_empty(tokens_per_expert.shape[0])
            dist.all_to_all_single(counts_of_all, tokens_per_expert)
            tokens_per_expert = counts_of_all
"""
PLAIN = {"BUILT": f"        {LIST}", "METHOD": "", "PARALLEL": "", "INDEX": "i"}
FORMS = {
    "a list": PLAIN,
    "built in a helper": PLAIN | {"BUILT": "        self._setup()", "METHOD": HELPER},
    "beside one rank's": PLAIN | {"BUILT": BRANCHES, "PARALLEL": PARALLEL, "INDEX": "i + self.ep_rank * 4"},
}


def source(form: dict[str, str]) -> str:
    text = BEFORE
    for name, code in form.items():
        text = text.replace(name, code)
    return text


def toy(text: str) -> torch.nn.Module:
    """The module that the text makes, seeded."""
    space: dict = {"ops": ops}
    exec(compile(text, "<toy>", "exec"), space)
    torch.manual_seed(0)
    return space["ToyMoE"](SimpleNamespace(hidden=8, width=6, experts=4, top_k=2))


def stacked_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the list as the stacks hold them."""
    given = {name: tensor for name, tensor in module.state_dict().items() if "experts" not in name}
    of = [(one.gate_proj.weight, one.up_proj.weight, one.down_proj.weight) for one in module.experts]
    stacks = {"gate_up_proj": [torch.cat([gate, up]) for gate, up, _ in of], "down_proj": [down for *_, down in of]}
    return given | {f"experts.{name}": torch.stack(parts).detach() for name, parts in stacks.items()}


@pytest.mark.parametrize("form", FORMS)
def test_the_stacks_compute_what_the_list_did(form):
    text = source(FORMS[form])
    before, after = toy(text), toy(applied(StackedExperts(), text).module.text)
    after.load_state_dict(stacked_weights(before))
    hidden_BSH = torch.randn(2, 5, 8)
    for training in (True, False):
        expected, found = (module.train(training)(hidden_BSH) for module in (before, after))
        torch.testing.assert_close(found, expected, rtol=0, atol=4 * torch.finfo(torch.float32).eps)
    for module in (before, after):
        module.train()(hidden_BSH).square().sum().backward()
    expected = torch.stack([one.down_proj.weight.grad for one in before.experts])
    assert expected.abs().max() > 0
    torch.testing.assert_close(after.experts.down_proj.grad, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(after.gate.weight.grad, before.gate.weight.grad, rtol=1e-5, atol=1e-7)


def test_only_the_calls_are_left_and_one_ranks_branch_says_what_divides_experts():
    after = applied(StackedExperts(), source(FORMS["beside one rank's"])).module
    moe = after.block("ToyMoE").text
    for gone in ("repeat_interleave", "argsort", "all_to_all", "else None", "dist.get_rank"):
        assert gone not in moe
    assert moe.count("self.experts(") == 2 and "set parallel.ep" in moe
    config = SimpleNamespace(hidden=8, width=6, experts=4, top_k=2, ep_size=2)
    space: dict = {"ops": ops}
    exec(compile(after.text, "<toy>", "exec"), space)
    with pytest.raises(ValueError, match=r"one rank's experts.*parallel\.ep"):
        space["ToyMoE"](config)


OTHERS = {
    "no rows where another list is empty": ("if len(outputs) else", "if len(counts) else"),
    "rows of another choice": ("expert(hidden_states[flat == i])", "expert(hidden_states[flat != i])"),
    "set to another expert's": ("y[flat == i] =", "y[flat == i + 1] ="),
    "no sum over a token's outputs": (".sum(dim=1)\n            y = y.to", ".mean(dim=1)\n            y = y.to"),
    "the repeated rows live on": ("y = y.to(hidden_states.dtype)", "y = (y + hidden_states[: len(y)]).to(y.dtype)"),
    "sorted the other way": ("argsort()", "argsort(descending=True)"),
    "another token of a place": ("order // chosen.shape[1]", "order % chosen.shape[0]"),
    "put back elsewhere": ("back[order] = made", "back[order.flip(0)] = made"),
    "pieces that overlap": ("start = end\n", "start = end - 1\n"),
    "a capacity": ("if number == 0:", "if number < 2:"),
    "the next rank's expert": ("self.experts[i]", "self.experts[i + 1]"),
    "marks of another table": ("counts.scatter_(1, chosen, 1)", "counts.scatter_(1, chosen, 2)"),
    "weights of nobody": ("mul_(weights.unsqueeze(dim=-1))", "mul_(1)"),
    "a use of one expert": ("return y\n", "return y + self.experts[0](hidden_states)\n"),
}


def require_left(text: str, why: str = "") -> None:
    outcome = applied(StackedExperts(), text)
    assert not outcome.hits and outcome.module.text == text
    assert len(outcome.notes) == 1
    assert (
        outcome.notes[0].startswith("ToyMoE: experts of no known form, left as they are") and why in outcome.notes[0]
    )


@pytest.mark.parametrize("case", OTHERS)
def test_another_form_stays_as_it_is_and_is_told(case):
    old, new = OTHERS[case]
    text = source(PLAIN)
    assert text.count(old) == 1
    require_left(text.replace(old, new))


def test_a_list_that_a_condition_leaves_out_stays():
    text = source(PLAIN).replace(f"        {LIST}", f"        if config.experts:\n            {LIST}")
    require_left(text, "one assignment to self.experts")
