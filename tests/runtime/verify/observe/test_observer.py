"""What steps of a generated file do is told with its line, and rules out layouts where ranks would compute something else."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from patchgen.runtime import attention, registry
from patchgen.runtime.verify import training_inputs as inputs
from patchgen.runtime.verify.observe import observer, reads
from patchgen.runtime.verify.observe.facts import LENGTH, STATE, VALUE, Fact, from_records, reason_against, to_records
from patchgen.runtime.verify.observe.places import Source
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.training_checks import Comparison
from patchgen.runtime.verify.training_path import prove_training_path, single_rank

LAYER = "        hidden_states = residual + hidden_states\n        return hidden_states\n"
MODEL = "        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)\n"
IMPORT = "import torch\nfrom patchgen.runtime import ops\nfrom torch import nn\n"
AGAIN = "hidden_states = self.layers[0](hidden_states, position_embeddings=position_embeddings)"


def planted(tmp_path: Path, code: str, *, in_model: bool = False, above: str = "") -> type[LlamaForCausalLM]:
    """The committed llama with lines at the end of a layer, or below the rotary embedding of the model."""
    place = MODEL if in_model else LAYER
    lines = "".join(f"        {line}\n" for line in code.splitlines())
    new = MODEL + lines if in_model else LAYER.replace("        return", f"{lines}        return")
    return changed(tmp_path, "llama", {place: new, IMPORT: f"{IMPORT}\n{above}\n"}).LlamaForCausalLM


def changed(tmp_path: Path, model: str, places: Mapping[str, str]) -> ModuleType:
    """The module of a committed model, with other text in these places."""
    committed = registry.find_model(model)
    text = committed.file.read_text()
    for place, new in places.items():
        assert text.count(place) == 1
        text = text.replace(place, new)
    folder = tmp_path / model
    folder.mkdir()
    (folder / committed.file.name).write_text(text)
    shutil.copy(committed.directory / "provenance.json", folder)
    return registry.read_model(folder).load()


def compared(head: type[PreTrainedModel]) -> Comparison:
    attention.register()
    config = small_config(head.config_class).config
    comparison = Comparison(head, head, config, media=False)
    comparison.choose(config, {})
    comparison.compared_attention = "patchgen_sdpa"
    return comparison


def observed(head: type[PreTrainedModel]) -> list[Fact]:
    comparison = compared(head)
    with single_rank() as comparison.state:
        facts, _ = observer.facts_of(comparison)
    return list(observer.on_slices(comparison, facts))


def test_nothing_is_found_in_a_model_that_does_nothing_of_the_kind():
    assert observed(registry.find_model("llama").load().LlamaForCausalLM) == []


@pytest.mark.parametrize(
    ("code", "in_model", "above"),
    [
        ("hidden_states = hidden_states * max(1.0, hidden_states.shape[1] / 8192)", False, ""),
        ("hidden_states = hidden_states * max(1, hidden_states.shape[1] // 8192)", False, ""),
        ("hidden_states = hidden_states * max(1.0, math.log(hidden_states.size(1), 8192))", False, "import math"),
        ("hidden_states = hidden_states * log(hidden_states.shape[1])", False, "from math import log"),
        ("hidden_states = hidden_states * torch.tensor(hidden_states.shape[1] / 8192).clamp(min=1.0)", False, ""),
        ("if hidden_states[0].shape[0] > 8192: hidden_states = hidden_states * 2", False, ""),
        ("if hidden_states[..., 0].numel() > 8192: hidden_states = hidden_states * 2", False, ""),
        ("hidden_states = hidden_states * (position_ids.max() / 8192).clamp(min=1.0)", True, ""),
        ("hidden_states = hidden_states * (torch.amax(position_ids.float()) / 8192).clamp(min=1.0)", True, ""),
    ],
)
def test_a_choice_by_the_length_is_told_and_leaves_whole_sequences(tmp_path, code, in_model, above):
    (fact,) = observed(planted(tmp_path, code, in_model=in_model, above=above))
    assert (fact.kind, fact.code) == (LENGTH, code) and fact.effect
    assert f"line {fact.line}, `{code}`" in reason_against([fact], ranks=2, sp=2)
    assert not reason_against([fact], ranks=2, sp=1)


def test_what_cannot_be_observed_leaves_what_the_worst_finding_would(tmp_path):
    code = "if type(hidden_states.shape[1]) is not int: raise TypeError('a length is a plain number here')"
    (fact,) = observed(planted(tmp_path, code))
    assert fact.kind == LENGTH and "could not be observed (TypeError: a length is a plain number here)" in fact.what
    assert reason_against([fact], ranks=2, sp=2) and not reason_against([fact], ranks=2, sp=1)


def test_a_slice_that_cannot_be_observed_leaves_the_effects_of_the_whole_rows(tmp_path):
    """The error is one of slices alone: they have fewer tokens than the smallest rows that are watched whole."""
    code = (
        "hidden_states = hidden_states * max(1.0, hidden_states.shape[1] / 8192)\n"
        "if torch.distributed.is_initialized(): raise KeyError('a slice')"
    )
    facts = observed(planted(tmp_path, code))
    assert any(reason_against([fact], ranks=2, sp=2) for fact in facts if fact.kind == LENGTH)


def test_a_step_with_the_router_loss_is_watched_too(tmp_path):
    place = "                loss += self.router_aux_loss_coef * "
    again = f"                if aux_loss > 1000:\n                    self.model(input_ids)\n{place}"
    (fact,) = observed(changed(tmp_path, "qwen3_moe", {place: again}).Qwen3MoeForCausalLM)
    assert (fact.kind, fact.code) == (VALUE, "if aux_loss > 1000:") and reason_against([fact], ranks=2, sp=1)
    assert observed(registry.find_model("qwen3_moe").load().Qwen3MoeForCausalLM) == []


@pytest.mark.parametrize(
    "code",
    [
        "if hidden_states.shape[1] > 1: hidden_states = hidden_states.clone()",
        "if hidden_states.shape[1] == residual.shape[1]: hidden_states = hidden_states.clone()",
        "hidden_states = hidden_states.view(-1, hidden_states.shape[1], hidden_states.shape[2])",
        "hidden_states = hidden_states * max(1.0, hidden_states.shape[2] / 8192)",  # the hidden size
    ],
)
def test_what_is_the_same_for_all_lengths_is_no_choice(tmp_path, code):
    assert observed(planted(tmp_path, code)) == []


@pytest.mark.parametrize(
    "code",
    [
        f"if hidden_states.abs().max() > 1000: {AGAIN}",
        f"if hidden_states.abs().max() > 1000:\n    {AGAIN}",
        f"if hidden_states.abs().max().item() > 1000: {AGAIN}",
        f"largest = float(hidden_states.abs().max())\nif largest > 1000: {AGAIN}",
        f"for _ in range(int(hidden_states.abs().max() / 1000)): {AGAIN}",
        f"for _ in (hidden_states > 1000).nonzero(): {AGAIN}",
        f"while (hidden_states > 1000).any(): {AGAIN}",
        f"if next((row for row in hidden_states.abs() if row.max() > 1000), None) is not None: {AGAIN}",
        f"if not any(row.any() for row in hidden_states[0]): {AGAIN}",
        f"calm = hidden_states.isfinite().all().tolist()\nif not calm: {AGAIN}",
        f"is_large = bool(hidden_states.abs().max() > 1000)\nif is_large and len(hidden_states) == 1: {AGAIN}",  # only if packed
    ],
)
def test_modules_behind_a_value_that_small_data_never_reach_are_told_and_leave_one_rank(tmp_path, code):
    (fact,) = observed(planted(tmp_path, code, in_model=True))
    assert (fact.kind, fact.code) == (VALUE, code.splitlines()[0])
    assert "layers.0" in fact.effect and "one rank, not on 2" in reason_against([fact], ranks=2, sp=1)
    assert not reason_against([fact], ranks=1, sp=1)


@pytest.mark.parametrize(
    "code",
    [
        "if hidden_states.abs().max() > 1000: hidden_states = hidden_states.clamp(-1000, 1000)",
        "if not hidden_states.isfinite().all(): raise ValueError('not finite')",
        "rows = hidden_states[hidden_states[..., 0] > 0]",
        "if hidden_states.abs().max() > 1000: hidden_states = self.mlp(hidden_states)",  # of a layer that is gathered whole
    ],
)
def test_a_value_that_decides_no_module_is_told_and_leaves_all_layouts(tmp_path, code):
    facts = observed(planted(tmp_path, code))
    assert [(fact.kind, fact.code, fact.effect) for fact in facts] == [(VALUE, code, "")]
    assert not reason_against(facts, ranks=8, sp=8)


@pytest.mark.parametrize(("layer", "has_effect"), [(1, True), (0, False)])
def test_what_another_value_runs_before_it_is_refused_counts(tmp_path, layer, has_effect):
    """The first layer is what every rank runs next: one that is refused after it has run nothing else."""
    refused = f"if hidden_states.abs().max() > 1000:\n    {AGAIN.replace('[0]', f'[{layer}]')}\n    raise ValueError('too large')"
    (fact,) = observed(planted(tmp_path, refused, in_model=True))
    assert (fact.kind, "layers.1 first" in fact.effect) == (VALUE, has_effect) and bool(fact.effect) is has_effect


def test_a_line_without_an_effect_is_tried_in_few_forwards(tmp_path):
    comparison = compared(planted(tmp_path, "if hidden_states.abs().max() > 1000: hidden_states = hidden_states * 2"))
    batch, forwards = inputs.trainer_inputs(comparison.plain), []

    def forward() -> torch.Tensor:
        forwards.append(comparison.forward(batch))
        return forwards[-1]

    values = reads.Observed(Source(type(comparison.generated)), comparison.generated)
    with single_rank() as comparison.state, torch.no_grad():
        found = [values.in_run(forward) for _ in range(reads.MOST_TRIES + 2)]
    assert [len(facts) for facts in found] == [1] * reads.MOST_TRIES + [0, 0]
    answers, following = 2, 2  # the other outcome once, and always; the same again, and what follows it
    assert len(forwards) == len(found) + (answers * (1 + following) + following) * reads.MOST_TRIES


@pytest.mark.parametrize(
    ("read", "has_effect"), [("hidden_states = hidden_states * getattr(self, 'scale', 1.0)", True), ("pass", False)]
)
def test_what_another_value_would_keep_for_the_next_step_leaves_one_rank(tmp_path, read, has_effect):
    keeps = "if hidden_states.abs().max() > 1000: self.scale = 2.0"
    facts = observed(planted(tmp_path, f"{read}\n{keeps}"))
    assert [(fact.kind, fact.code, bool(fact.effect)) for fact in facts] == [(VALUE, keeps, has_effect)]
    assert bool(reason_against(facts, ranks=2, sp=1)) is has_effect


SEEN = "self.seen = getattr(self, 'seen', 0) + 1"
LERP = "self.scale.lerp_(hidden_states.detach().mean(), 0.1)"
HELD = "if not hasattr(self, 'scale'): self.register_buffer('scale', torch.ones(()))\n"


@pytest.mark.parametrize(
    ("code", "above", "line", "is_read"),
    [
        (f"{SEEN}\nhidden_states = hidden_states * (1 + 0.01 * self.seen)", "", SEEN, True),
        (f"{HELD}{LERP}\nhidden_states = hidden_states + self.scale", "", LERP, True),
        ("HISTORY.append(hidden_states.detach().mean())", "HISTORY = []", "HISTORY.append(hidden_states.detach().mean())", True),
        ("self.last = hidden_states.shape", "", "self.last = hidden_states.shape", False),
    ],
)  # fmt: skip
def test_what_a_step_keeps_is_told_and_leaves_one_rank_if_the_next_step_reads_it(tmp_path, code, above, line, is_read):
    facts = [fact for fact in observed(planted(tmp_path, code, above=above)) if fact.kind == STATE]
    assert {fact.code for fact in facts} == {line}
    assert bool(reason_against(facts, ranks=2, sp=1)) is is_read


def test_facts_are_part_of_the_path_that_a_run_is_proven_on(tmp_path):
    head = planted(tmp_path, "hidden_states = hidden_states * max(1.0, hidden_states.shape[1] / 8192)")
    path = prove_training_path(LlamaForCausalLM, head, small_config(LlamaForCausalLM.config_class).config)
    assert path.failures == ()  # rows are too short for it
    (fact,) = path.facts
    assert fact.kind == LENGTH and fact.line in path.executed_lines
    assert from_records(to_records(path.facts)) == path.facts


@pytest.mark.parametrize(
    ("code", "has_effect"),
    [
        ("seq_len = torch.max(position_ids) + 1", False),
        ("if position_ids.max() > 8192: hidden_states = hidden_states * 2", True),
        ("if position_ids.max() < 4: hidden_states = hidden_states * 2", True),
    ],
)
def test_a_largest_position_has_an_effect_if_another_changes_the_loss(tmp_path, code, has_effect):
    """phimoe computes one, and reads it only with rotary parameters that are not the default."""
    facts = observed(planted(tmp_path, code, in_model=True))
    assert [(fact.code, bool(fact.effect)) for fact in facts if fact.kind == LENGTH] == [(code, has_effect)]
