"""What a model computes from the length of a sequence is told by the lengths that a step uses, in layers and functions."""

from __future__ import annotations

import pytest
from changed_sources import SourceChange, changed
from judged import EQUAL, TOLD, judged

from patchgen.runtime.verify import told

PLACES = {
    "attention": "        query_states = self.q_norm(",
    "rotary": "        freqs = position_ids[..., None]",
    "function": "    q_embed = (q * cos)",
    "model": "        position_embeddings = self.rotary_emb(",
}


def at(place: str, code: str) -> SourceChange:
    """The change of qwen3_moe that runs code at this place."""
    above = PLACES[place]
    indent = above[: len(above) - len(above.lstrip())]
    lines = "".join(f"{indent}{line}\n" for line in code.split("\n"))
    return changed("", "qwen3_moe", f"{place}: {code}", (above, lines + above))


QUICK = (at("rotary", "position_ids = position_ids / (position_ids.max() + 1).clamp(min=4096)"),)
LATER = (
    at("attention", "if hidden_states.size(1) > 4096: hidden_states = hidden_states * 1.4"),
    at("attention", "hidden_states = hidden_states * (1 + 0.05 * (max(hidden_states.shape[1], 1000) - 1000))"),
    # Whether what follows only raises is not asked: a slice is shorter than the row that the file refuses.
    at("attention", "if hidden_states.shape[1] > 100_000: raise ValueError('longer than the table')"),
    at("attention", "B, S, H = shape = hidden_states.shape\nif shape[0] * shape[1] > 4000: hidden_states = hidden_states * 1.4"),
    at("attention", "hidden_states = hidden_states * 2 if 1000 <= hidden_states.shape[1] else hidden_states"),
    at("attention", "rest = hidden_states.shape[1] - 1000\nif rest > 0: hidden_states = hidden_states * 1.4"),
    at("attention", "hidden_states = hidden_states * (1 + (hidden_states.shape[1] > 1000))"),
    at("attention", "is_long = hidden_states.shape[1] >= 1000\nhidden_states = hidden_states * (2 - is_long)"),
    at("attention", "hidden_states = hidden_states / torch.tensor(hidden_states.shape[1]).clamp(min=3000) * 3000"),
    at("attention", "if self.training and not hidden_states.shape[1] < 1000: hidden_states = hidden_states * 1.4"),
    at("attention", "num_windows = hidden_states.shape[1] // 1000\nif num_windows > 1: hidden_states = hidden_states * 1.4"),
    at("attention", "if self.k_proj(hidden_states).numel() > 96_000: hidden_states = hidden_states * 1.4"),
    at("function", "if q.shape[2] > 1000: q = q * 1.4"),
    at("rotary", "if position_ids.shape[-1] > 1000: x = x * 1.4; position_ids = position_ids * 2"),
    at("rotary", "places = position_ids.float()\nposition_ids = position_ids / (torch.max(places + 1) / 4096).clamp(min=1)"),
    at("model", "if inputs_embeds.shape[1] > 1000: inputs_embeds = inputs_embeds * 2\nhidden_states = inputs_embeds"),
    at("model", "if inputs_embeds.shape[1] > 320: hidden_states = hidden_states + torch.roll(inputs_embeds, 1, dims=1)"),
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in LATER)], ids=lambda case: case.title
)
def test_a_choice_by_the_length_is_told(case: SourceChange):
    found = judged(case)
    assert (found.kind, found.by) == (TOLD, told.FACT), found


@pytest.mark.parametrize(
    "code",
    [
        "if hidden_states.shape[1] > 1: hidden_states = hidden_states * 1.4",
        "if self.head_dim > 10: hidden_states = hidden_states * 1.4",
        "if past_key_values is not None and past_key_values.get_seq_length() > 10: hidden_states = hidden_states * 2",
        "if not self.training and hidden_states.shape[1] > 1000: hidden_states = hidden_states * 2",
    ],
)
@pytest.mark.slow
def test_other_uses_of_a_size_are_not(code: str):
    found = judged(at("attention", code))
    assert found.kind == EQUAL, found
