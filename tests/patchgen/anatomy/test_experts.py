"""The formula of experts is read from resolved code: what only looks like it is a miss, what means it is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from generation_cases import edited, load

from patchgen import source
from patchgen.anatomy import study
from patchgen.anatomy.experts import ExpertsFormula, read_experts
from patchgen.errors import Missed
from patchgen.passes.fused_experts import FusedExperts
from patchgen.passes.fused_ops import FusedOps

MODELS = {"Qwen3MoeExperts": "qwen3_moe", "GptOssExperts": "gpt_oss", "MuseSparkExperts": "muse_spark"}
MODELS |= {"Llama4TextExperts": "llama4"}
UPSTREAM = {name: load(model) for name, model in MODELS.items()}
ZEROS = "final_hidden_states = torch.zeros_like(hidden_states)\n"
DOWN = "current_hidden_states = nn.functional.linear(current_hidden_states, self.down_proj[expert_idx])\n"
CLASS = "@use_experts_implementation\nclass Qwen3MoeExperts(nn.Module):"
INIT = "self.act_fn = ACT2FN[config.hidden_act]\n\n    def forward(\n"  # of the experts
ACT = "self.act_fn = ACT2FN[config.hidden_act]\n"
ACTIVATED = "current_hidden_states = self.act_fn(gate) * up\n"
PAD = " " * 12


def read(owner: str, *edits: tuple[str, str]) -> ExpertsFormula:
    origin = edited(UPSTREAM[owner], *edits) if edits else UPSTREAM[owner]
    return read_experts(study(source.parse(origin.text, origin.path), origin), owner)


def above(code: str) -> tuple[str, str]:
    """An edit that puts code above the class of experts."""
    return CLASS, f"{code}\n\n\n{CLASS}"


def within(member: str) -> tuple[str, str]:
    """An edit that gives the class a method more."""
    return INIT, INIT.replace("    def forward", f"    {member}\n\n    def forward")


GUESSED = {
    "a function of the name linear": (
        ("nn.functional.linear(current_state", "linear(current_state"),
        above("def linear(x, weight):\n    return 2 * (x @ weight.T)"),
    ),
    "a module that is called like torch's": (
        ("nn.functional.linear(current_state", "F.linear(current_state"),
        ("import torch.nn.functional as F", "from . import functional as F"),
    ),
    "a local function in an import's place": (
        (ZEROS, f"nn = self.library\n        {ZEROS}"),
    ),
    "tokens and slots by another order": ((".permute(2, 1, 0)", ".permute(2, 0, 1)"),),
    "no gradient of the projection": ((ACTIVATED, f"with torch.no_grad():\n{PAD}    {ACTIVATED}"),),
    "a value of the round before": ((ACTIVATED, f"hidden_states = hidden_states * 2\n{PAD}{ACTIVATED}"),),
}  # fmt: skip
SAME = {
    "arguments by keyword": (
        ("(current_hidden_states, self.down_proj[expert_idx])", "(weight=self.down_proj[expert_idx], input=current_hidden_states)"),
    ),
    "a number of the config that is kept": (
        ("self.num_experts = config", "self.config = config\n        self.num_experts = config"),
        ("if expert_idx == self.num_experts", "if expert_idx == self.config.num_experts"),
    ),
    "factors in the other order": (("self.act_fn(gate) * up", "up * self.act_fn(gate)"),),
    "an alias of torch's functions": (("nn.functional.linear(current_state", "F.linear(current_state"),),
    "a function of the file": (
        ("self.act_fn(gate) * up", "product(self.act_fn(gate), up)"),
        above("def product(left, right):\n    return left * right"),
    ),
    "a method": (
        ("self.act_fn(gate) * up", "self.gated(gate, up=up)"),
        within("def gated(self, gate, up):\n        return self.act_fn(gate) * up"),
    ),
    "an activation of two": (
        (INIT, INIT.replace("ACT2FN[config.hidden_act]", "nn.SiLU() if config.hidden_act == 'silu' else nn.GELU()")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GUESSED)
def test_what_only_looks_like_the_formula_is_unread(case):
    with pytest.raises(Missed):
        read("Qwen3MoeExperts", *GUESSED[case])


@pytest.mark.parametrize("case", SAME)
def test_what_means_the_formula_is_read(case):
    assert read("Qwen3MoeExperts", *SAME[case]) == read("Qwen3MoeExperts")


BATCHED = {
    "tokens where experts stand": ("view(self.gate_up_proj.shape[0], -1,", "view(-1, self.gate_up_proj.shape[0],"),
    "the other half activated": ("up * self.act_fn(gate)", "gate * self.act_fn(up)"),
    "halves of the rows": ("gate_up.chunk(2, dim=-1)", "gate_up.chunk(2, dim=1)"),
    "left in parts": ("next_states = next_states.view(-1, self.hidden_size)", "next_states = next_states"),
    "scaled": ("return next_states", "return next_states * 2"),
    "something added": ("(up * self.act_fn(gate))", "(up * self.act_fn(gate) + up)"),
    "no gate": ("up * self.act_fn(gate)", "self.act_fn(gate_up)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHED)
@pytest.mark.sampled(3)
def test_what_only_looks_like_products_of_all_experts_is_unread(case):
    with pytest.raises(Missed):
        read("Llama4TextExperts", BATCHED[case])


def test_products_of_all_experts_are_read():
    found = read("Llama4TextExperts")
    assert (found.hidden_states, found.top_k_index, found.top_k_weights) == ("hidden_states", "", "")
    assert (found.gate_up_weight, found.down_weight, found.activation) == ("gate_up_proj", "down_proj", "act_fn")
    assert found.is_transposed and found.is_gated and found.num_experts == "self.num_experts"
    counted = ("view(self.gate_up_proj.shape[0], -1,", "view(self.num_experts, -1,")
    assert read("Llama4TextExperts", counted) == found


def test_a_norm_of_each_row_is_read():
    assert read("MuseSparkExperts").post_norm == "post_expert_norm"


def test_the_number_of_experts_goes_by_what_the_stacks_have():
    name = "self.num_experts"
    text = UPSTREAM["Qwen3MoeExperts"].text
    start, end = text.index(CLASS), text.index("class Qwen3MoeTopKRouter")
    renamed = text[:start] + text[start:end].replace(name, "self.many") + text[end:]
    origin = replace(UPSTREAM["Qwen3MoeExperts"], text=renamed)
    assert read_experts(study(source.parse(renamed), origin), "Qwen3MoeExperts").num_experts == "self.many"


def outcome(kind, *edits, **facts):
    origin = replace(edited(UPSTREAM["Qwen3MoeExperts"], *edits), **facts)
    module = source.parse(origin.text, origin.path)
    return kind.apply(module, study(module, origin))


SECOND = {
    "a stack that a batched product takes": (
        "class More(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.empty(config.many, config.hidden_size, config.hidden_size))\n\n"
        "    def forward(self, x, chosen):\n        for e in chosen.unique():\n"
        "            x = x + x @ self.weight[e]\n        return x"
    ),
    "a stack that is filled where it is made": (
        "class More(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.empty(config.many, config.size, config.size).normal_(std=0.1) * 0.5)\n\n"
        "    def forward(self, x, e):\n        return x @ self.weight[e]"
    ),
    "a list of plain modules": (
        "class More(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
        "        self.parts = nn.ModuleList([nn.Linear(8, 8) for _ in range(config.many)])\n\n"
        "    def forward(self, x, chosen):\n        total = torch.zeros_like(x)\n"
        "        for e, part in enumerate(self.parts):\n            rows = (chosen == e).nonzero()[:, 0]\n"
        "            total.index_add_(0, rows, part(x[rows]))\n        return total"
    ),
}


@pytest.mark.parametrize("case", SECOND)
def test_a_second_stack_of_experts_that_no_role_names_is_named(case):
    found = outcome(FusedExperts(), above(SECOND[case]))
    assert any(note.startswith("More ") and "left as they are" in note for note in found.notes)


IMPORT = "from .configuration_qwen3_moe import Qwen3MoeConfig"
USE = (f"{ACT}\n    def forward(self, x):", f"{ACT}        self.more = More(config)\n\n    def forward(self, x):")


def test_experts_of_another_file_are_named():
    theirs = (IMPORT, f"{IMPORT}\nfrom ..mixtral.modeling_mixtral import MixtralExperts as More")
    named = "uses MixtralExperts of transformers.models.mixtral.modeling_mixtral"
    assert any(named in note for note in outcome(FusedExperts(), theirs, USE).notes)
    beside = (IMPORT, f"{IMPORT}\nfrom .parts import MixtralExperts as More")
    parts = {"parts.py": load("mixtral").text}
    named = "uses MixtralExperts of transformers.models.qwen3_moe.parts"
    assert any(named in note for note in outcome(FusedExperts(), beside, USE, siblings=parts).notes)


@pytest.mark.parametrize("kind", ["RMSNorm", "MLP"])
def test_what_moved_to_another_file_is_named(kind):
    moved = (IMPORT, f"{IMPORT}\nfrom ..qwen3.modeling_qwen3 import Qwen3{kind} as More")
    assert any(f"uses Qwen3{kind} of" in note for note in outcome(FusedOps(), moved, USE).notes)
    unseen = (IMPORT, f"{IMPORT}\nfrom .parts import More")
    assert any("uses More of" in note and "not here" in note for note in outcome(FusedOps(), unseen, USE).notes)


@pytest.mark.parametrize(
    ("model", "named"),
    [("deepseek_v2", "apply_rotary_emb: a rotary"), ("axk2", "AXK2GatedRMSNorm: a gate around a norm")],
)
def test_rotations_of_complex_numbers_and_gated_norms_are_named(model, named):
    origin = load(model)
    module = source.parse(origin.text, origin.path)
    assert any(note.startswith(named) for note in FusedOps().notes(module, study(module, origin)))


def test_a_norm_of_another_torch_is_no_seam():
    assert not any("Norm" in hit.site for hit in outcome(FusedOps(), above("class torch:\n    float32 = None")).hits)


def test_a_cap_from_a_part_of_the_config_is_a_number():
    """Its class is built elsewhere in the file with `config.text_config.final_logit_softcapping`."""
    origin = load("inkling2_text")
    assert isinstance(
        read_experts(study(source.parse(origin.text, origin.path), origin), "Inkling2Experts"), ExpertsFormula
    )
