"""Changes of experts and towers that no reader refuses: the proof tells each, in one process or on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from changed_sources import changed
from judged import EQUAL, NOT_RUN, TOLD, judged
from outside_forms import Form
from test_outside_forms import generated_from

from patchgen.runtime.verify import told, verdict
from patchgen.runtime.verify.verify_model import verify_model

ACT = "self.act_fn = ACT2FN[config.hidden_act]\n\n    def forward(\n"  # of the experts of qwen3_moe
METHOD = "    def activate(self, gate):\n        return {}\n\n    def forward(\n"
GATED = ("self.act_fn(gate) * up", "self.activate(gate) * up")
DOWN = "current_hidden_states = nn.functional.linear(current_hidden_states, self.down_proj[expert_idx])\n"
CALLED = "final_hidden_states = self.experts(hidden_states_reshaped, selected_experts, routing_weights)\n"
STACKED = {
    "an activation that mixes rows": (GATED, (ACT, ACT.replace("    def forward(\n", METHOD.format("gate.softmax(dim=0)")))),
    "a norm that mixes rows": (
        (DOWN, f"{DOWN}            current_hidden_states = self.mix(current_hidden_states)\n"),
        (ACT, ACT.replace("    def forward(\n", METHOD.replace("activate", "mix").format("gate - gate.mean(0)"))),
    ),
}  # fmt: skip
READ_ELSEWHERE = (
    CALLED,
    f"{CALLED}        final_hidden_states = final_hidden_states + self.experts.down_proj.square().mean()\n",
)


@pytest.mark.parametrize("case", STACKED)
@pytest.mark.sampled(2)
def test_stacked_experts_of_another_formula_are_told(case: str):
    found = judged(changed("", "qwen3_moe", case, *STACKED[case]))
    assert found.kind == TOLD, found


@pytest.mark.slow  # two ranks
def test_weights_of_experts_that_are_read_elsewhere_are_told(two_ranks):
    found = judged(changed("", "qwen3_moe", "", READ_ELSEWHERE), pool=two_ranks)
    assert found.kind == TOLD, found


def test_what_an_expert_does_not_run_changes_nothing():
    """A function that nothing calls is no reason to refuse a file."""
    hook = "def soften(experts):\n    experts.act_fn = nn.Softmax(dim=1)\n\n\n@use_experts_implementation\n"
    found = judged(changed("", "qwen3_moe", "", ("@use_experts_implementation\n", hook)))
    assert found.kind == EQUAL, found


LIST_ACT = "self.act = ACT2FN[config.hidden_act]\n"
FORWARD = "    def forward(self, x):\n        return self.wo("
LISTED = {
    "an activation that mixes rows": (LIST_ACT, "self.act = nn.Softmax(dim=0)\n"),
    "an activation with learned values": (LIST_ACT, "self.act = nn.PReLU()\n"),
    "a hook on a projection": (LIST_ACT, f"{LIST_ACT}        self.wo.register_forward_hook(lambda *a: 2 * a[-1])\n"),
    "a hook on a weight": (LIST_ACT, f"{LIST_ACT}        self.wo.weight.register_hook(lambda g: 2 * g)\n"),
    "a weight of another form": (LIST_ACT, f"{LIST_ACT}        nn.utils.parametrizations.weight_norm(self.wo)\n"),
    "a forward of its own": (LIST_ACT, f"{LIST_ACT}        self.wo.forward = lambda x: 2 * x[..., :1]\n"),
    "a call of its own": (FORWARD, f"    def __call__(self, x):\n        return 2 * super().__call__(x)\n\n{FORWARD}"),
    "a use by the layer that holds it": (
        "return hidden_states + self.moe(self.moe_norm(hidden_states))",
        "return hidden_states + self.moe(self.moe_norm(hidden_states)) + self.moe.experts[0](hidden_states)",
    ),
}


@pytest.mark.parametrize("case", LISTED)
@pytest.mark.sampled(8)
def test_experts_of_a_list_that_do_more_are_told(case: str, tmp_path: Path):
    model = generated_from(Form((LISTED[case],)).write(tmp_path))
    try:
        found = verdict.of(verify_model(model, variants=("base",), implementations=()))
    except Exception as error:  # what the generated file raises is told as well
        assert str(error)
    else:
        assert found.status != verdict.PROVEN, found


PROJECTED = "        attn_output = self.proj(attn_output)\n"
BLOCK = "        hidden_states = hidden_states + self.mlp(self.norm2(hidden_states))\n"
IN_LOOP = "            if layer_num in self.deepstack_visual_indexes:\n"
MERGED = "        x = self.linear_fc2(self.act_fn(self.linear_fc1(x)))\n        return x\n"
MEAN = "hidden_states = hidden_states - hidden_states.mean(0, keepdim=True)\n"
MIXED = {
    "divided by the number of rows": "attn_output.div(seq_length)",
    "a builtin sum over rows": "attn_output - sum(attn_output)",
    "a norm over rows": "nn.functional.layer_norm(attn_output, attn_output.shape)",
    "rows turned round": "attn_output + attn_output.flip(0)",
    "the first row": "attn_output - attn_output[:1]",
    "rows in another form": "attn_output.transpose(0, 1).reshape(seq_length, -1)",
}
TOWERS = {title: (PROJECTED, f"        attn_output = {code}\n{PROJECTED}") for title, code in MIXED.items()}
TOWERS |= {
    "a block": (BLOCK, f"{BLOCK}        {MEAN}"),
    "the loop over layers": (IN_LOOP, f"            {MEAN}{IN_LOOP}"),
    "the loop over layers, in place": (IN_LOOP, f"            hidden_states.sub_(hidden_states.mean(0))\n{IN_LOOP}"),
    "a merger": (MERGED, MERGED.replace("return x", "return x - x.mean(0)")),
}


@pytest.mark.slow  # two ranks, images
@pytest.mark.parametrize("case", TOWERS)
def test_a_tower_that_mixes_rows_is_told(case: str, two_ranks):
    found = judged(changed("", "qwen3_vl", case, TOWERS[case]), pool=two_ranks)
    assert found.kind in (TOLD, NOT_RUN) and found.by in (told.PROOF, told.FACT, told.TWO_RANKS), found


RULE = "last_recurrent_state = torch_chunk_gated_delta_rule("
CONVOLVED = "mixed_qkv = causal_conv1d_fn("
NET = "@use_kernelized_func(\n    [torch_recurrent_gated_delta_rule"
HIDDEN = {
    "another name": (
        (RULE, RULE.replace("torch_chunk_gated_delta_rule", "rule")),
        (NET, f"rule = torch_chunk_gated_delta_rule\n\n\n{NET}"),
    ),
    "a sum along tokens": ((CONVOLVED, f"mixed_qkv = mixed_qkv.cumsum(-1)\n            {CONVOLVED}"),),
}  # fmt: skip


@pytest.mark.slow  # two ranks
@pytest.mark.parametrize("case", HIDDEN)
def test_an_operation_along_the_sequence_that_nobody_wraps_is_told(case: str, two_ranks):
    found = judged(changed("", "qwen3_next", case, *HIDDEN[case]), pool=two_ranks)
    # Without a scan that is known, documents get rows of their own, and ranks that share a sequence are refused.
    is_refused_on_slices = any("Train this model with sp=1" in why for why in found.left_out.values())
    assert found.kind == TOLD or is_refused_on_slices, found


SOUND = "        padded_embed = torch.cat(padded_embeds, dim=0)\n"


@pytest.mark.slow  # two ranks, sounds
def test_chunks_of_sound_that_are_mixed_are_told(two_ranks):
    edit = (SOUND, f"{SOUND}        padded_embed = padded_embed - padded_embed.mean(0)\n")
    found = judged(changed("", "qwen3_omni_moe", "", edit), pool=two_ranks)
    assert found.kind == TOLD and found.by == told.TWO_RANKS, found


@pytest.mark.slow  # two ranks, sounds
def test_chunks_of_sound_that_are_each_changed_alone_agree_on_ranks(two_ranks):
    edit = (SOUND, f"{SOUND}        padded_embed = padded_embed - padded_embed.mean((1, 2, 3), keepdim=True)\n")
    found = judged(changed("", "qwen3_omni_moe", "", edit), pool=two_ranks)
    assert found.kind == EQUAL and "2 ranks, sp 2, whole parameters, audio" in found.compared, found
