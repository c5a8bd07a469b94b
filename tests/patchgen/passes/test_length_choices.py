"""What is chosen by the length of a sequence refuses slices; what else a size is compared with does not."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.passes.base import Outcome
from patchgen.passes.length_choices import LengthChoices

MODEL = """
LIMIT = 10

def rotated(query_states):
    {function}
    return query_states

class ExampleRotary(nn.Module):
    def forward(self, x, position_ids):
        {rotary}
        return x

class ExampleAttention(nn.Module):
    def forward(self, hidden_states, position_ids, past_key_values=None, window: int = 7):
        B, S, H = shape = hidden_states.shape
        key_states = self.k_proj(hidden_states)
        query_states = rotated(self.q_proj(hidden_states))
        {attention}
        return hidden_states

class ExampleModel(PreTrainedModel):
    def __init__(self, config):
        self.rotary = ExampleRotary()
        self.layers = nn.ModuleList([ExampleAttention(config) for _ in range(2)])

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None):
        inputs_embeds = self.embed_tokens(input_ids)
        {model}
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, position_ids)
        return inputs_embeds
"""
REFUSAL = "ops.refuse_length_choice("


def written(**code: str) -> Outcome:
    return applied(
        LengthChoices(), MODEL.format(**dict.fromkeys(("function", "rotary", "attention", "model"), "pass") | code)
    )


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("attention", "if hidden_states.size(1) > 10: hidden_states = hidden_states * 1.4"),
        ("attention", "hidden_states = hidden_states * (1 + 0.05 * min(hidden_states.shape[1], 10))"),
        ("attention", "if shape[0] * shape[1] > 40: hidden_states = hidden_states * 1.4"),
        ("attention", "hidden_states = hidden_states * 2 if 10 <= S else hidden_states"),
        ("attention", "if S - self.window > 0: hidden_states = hidden_states * 1.4"),
        ("attention", "rest = S - 10\n        if rest > 0: hidden_states = hidden_states * 1.4"),
        ("attention", "hidden_states = hidden_states * (1 + (S > LIMIT))"),
        ("attention", "is_long = S >= window\n        hidden_states = hidden_states * is_long"),
        (
            "attention",
            "limit = 2 * self.config.size\n        long = S > limit\n        hidden_states = hidden_states * long",
        ),
        ("attention", "hidden_states = hidden_states / torch.tensor(S).clamp(min=30)"),
        ("attention", "if self.training and not S < self.limit: hidden_states = hidden_states * 1.4"),
        ("attention", "if self.k_proj(hidden_states).numel() > 96: hidden_states = hidden_states * 1.4"),
        ("function", "if query_states.shape[2] > 10: query_states = query_states * 1.4"),
        ("rotary", "if position_ids.shape[-1] > 10: x = x * 1.4"),
        ("rotary", "x = x / (position_ids.max() + 1).clamp(min=30)"),
        ("rotary", "places = position_ids.float()\n        x = x / torch.max(places + 1)"),
        ("model", "if inputs_embeds.shape[1] < 10: return inputs_embeds"),
        (
            "model",
            "if inputs_embeds.shape[1] > 32: inputs_embeds = inputs_embeds + torch.roll(inputs_embeds, 1, dims=1)",
        ),
    ],
)
def test_a_choice_by_the_length_refuses_slices(place: str, code: str):
    outcome = written(**{place: code})
    owner = {"function": "rotated", "rotary": "ExampleRotary.forward", "attention": "ExampleAttention.forward"}
    assert [hit.site for hit in outcome.hits] == [owner.get(place, "ExampleModel.forward")]
    above, _, below = outcome.module.text.partition(REFUSAL)
    assert code.splitlines()[-1].split(":")[0] in below and above.rstrip().endswith("# patchgen: length_choices")


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("attention", "if S > 1: hidden_states = hidden_states * 1.4"),
        ("attention", "if S == 1: hidden_states = hidden_states * 1.4"),
        ("attention", "if 0 < S: hidden_states = hidden_states * 1.4"),
        ("attention", "if S > key_states.shape[1]: hidden_states = hidden_states * 1.4"),
        ("attention", "if S > self.weight.shape[0]: raise ValueError(S)"),
        ("attention", "if S > 10: raise ValueError('longer than the table')"),
        ("attention", "chosen = hidden_states.topk(min(self.index_topk, hidden_states.shape[1]), dim=1)"),
        ("attention", "count = min(self.index_topk, S)\n        chosen = torch.topk(hidden_states, count, dim=1)"),
        ("attention", "hidden_states = hidden_states[:, max(0, S - 4):]"),
        ("attention", "mask = position_ids < S"),
        ("attention", "ratio = position_ids[0] / 2\n        if S > ratio: hidden_states = hidden_states * 1.4"),
        ("attention", "if S > self.weights.size(0): self.weights = self.longer(S)"),
        ("attention", "places = position_ids.clamp(0, S - 1)"),
        ("attention", "num_windows = S // 10\n        if num_windows > 1: hidden_states = hidden_states * 1.4"),
        ("attention", "if self.size > 10: hidden_states = hidden_states * 1.4"),
        ("attention", "if past_key_values is not None and past_key_values.get_seq_length() > 10: pass"),
        (
            "attention",
            "if past_key_values is not None:\n            hidden_states = hidden_states if S < 10 else key_states",
        ),
        ("attention", "if not self.training and S > 10:\n            hidden_states = hidden_states[:, : min(S, 10)]"),
        ("attention", "if self.training: pass\n        else: hidden_states = hidden_states[:, : min(S, 10)]"),
        ("attention", "hidden_states = hidden_states if self.training else hidden_states[:, : min(S, 10)]"),
        ("attention", "if past_key_values is None: pass\n        elif S > 10: hidden_states = key_states"),
        ("model", "if position_ids is None:\n            if inputs_embeds.shape[1] > 10: position_ids = 2"),
        ("rotary", "x = x.max()"),
    ],
)
def test_other_uses_of_a_size_are_left_alone(place: str, code: str):
    assert written(**{place: code}).hits == ()


@pytest.mark.parametrize(("cache", "num_hits"), [("cache", 0), ("memory", 1)])
def test_a_cache_is_the_parameter_that_transformers_calls_so(cache: str, num_hits: int):
    """From 5.24.0 on it is `cache`."""
    code = "if past_key_values is not None:\n            hidden_states = hidden_states if S < 10 else key_states"
    others = dict.fromkeys(("function", "rotary", "model"), "pass")
    text = MODEL.format(attention=code, **others).replace("past_key_values", cache)
    assert len(applied(LengthChoices(), text).hits) == num_hits


ROW_LENGTH = """from transformers.modeling_rope_utils import dynamic_rope_update

class ExampleRotary(nn.Module):
    @dynamic_rope_update
    def forward(self, x, position_ids):
        length = torch.max(position_ids) + 1
        scale = 1.0
        if self.config.rope_parameters["rope_type"] != "default" and length:
            scale = 2.0 if length > 4096 else 1.0
        return x * scale
"""


@pytest.mark.parametrize(
    ("old", "new", "hits"),
    [
        ("", "", 0),
        ('!= "default"', '== "default"', 1),
        ("@dynamic_rope_update", "@torch.no_grad()", 1),
        ("x * scale", "x * length", 1),
    ],
)
def test_the_largest_position_of_a_row_is_handed_to_rotary_embeddings_that_depend_on_it(old: str, new: str, hits: int):
    text = MODEL.format(function="pass", rotary="pass", attention="pass", model="pass")
    text = text.replace("class ExampleRotary", "class Unused")
    assert len(applied(LengthChoices(), ROW_LENGTH.replace(old, new) + text).hits) == hits


def test_an_elif_is_refused_above_its_if():
    code = "if self.flag:\n            pass\n        elif S > 10:\n            hidden_states = hidden_states * 1.4"
    above, _, below = written(attention=code).module.text.partition(REFUSAL)
    assert "if self.flag:" in below and "if self.flag:" not in above


def test_a_tower_may_choose_by_its_own_length():
    code = "if pixel_values.shape[1] > 10: pixel_values = pixel_values * 2"
    tower = f"""
class ExampleTower(PreTrainedModel):
    def __init__(self, config):
        self.patch = nn.Conv2d(3, 8, 2)

    def forward(self, pixel_values):
        {code}
        return self.patch(pixel_values)
"""
    text = tower + MODEL.format(function="pass", rotary="pass", attention="pass", model="pass")
    text = text.replace("self.rotary = ", "self.tower = ExampleTower(config)\n        self.rotary = ")
    assert applied(LengthChoices(), text).hits == ()
