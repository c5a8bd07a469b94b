"""Each form of outside files that docs/own_architecture.md promises is generated; the slow tests prove each against the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from outside_forms import FORMS

from patchgen import pipeline
from patchgen.commands import generation
from patchgen.runtime import registry
from patchgen.runtime.verify import media_ranks, verdict
from patchgen.runtime.verify.verify_model import verify_model
from patchgen.upstream import load

PAGE = (Path(__file__).parents[2] / "docs" / "own_architecture.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.count("|") > 8 and "---" not in line][1:]


def test_every_row_of_the_page_is_a_form_here():
    assert len(ROWS) >= 6
    assert [row for row in ROWS if not any(form.startswith(row) for form in FORMS)] == []


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_generated(name: str, tmp_path: Path):
    form = FORMS[name]
    generated = pipeline.generate(load("list_moe", source=form.write(tmp_path)))
    hits = {step.name: [hit.what for hit in step.outcome.hits] for step in generated.steps}
    assert hits["fused_loss"] == ["causal_lm_loss seam"]
    stacked = [what for what in hits["stacked_experts"] if " as ListMoeBlockStackedExperts" in what]
    assert (len(stacked), len(hits["fused_experts"])) == ((1, 1) if form.has_experts else (0, 0))
    plan = '{"ListMoeBlockStackedExperts": ("gate_up_proj", "down_proj")}' if form.has_experts else "{}"
    assert f"ops.parallel_plan(self, experts={plan})" in generated.text
    if form.has_experts:
        assert "for i, expert in" not in generated.text and "for number in" not in generated.text


def test_a_table_with_computed_keys_has_the_eager_class_for_our_attention(tmp_path: Path):
    """A step would end in a KeyError; the slow proof below runs it."""
    form = FORMS["DeepSeek-VL2, attention of a table with computed keys"]
    generated = pipeline.generate(load("list_moe", source=form.write(tmp_path)))
    hits = {step.name: [hit.site for hit in step.outcome.hits] for step in generated.steps}
    assert hits["attention_tables"] == ["ListMoeLayer"]
    assert 'chosen = ("eager" if "patchgen_" in config._attn_implementation' in generated.text


def test_a_loop_of_no_known_form_stays_and_is_told(tmp_path: Path):
    """Its experts are not divided over ranks; the plan says why."""
    code = FORMS["Mixtral"].write(tmp_path)
    file = code / "modeling_list_moe.py"
    capped = file.read_text().replace("made = layer(state)", "made = layer(state).clamp(-1, 1)")
    file.write_text(capped)
    generated = pipeline.generate(load("list_moe", source=code))
    notes = {step.name: step.outcome.notes for step in generated.steps}
    assert any("ListMoeBlock: experts of no known form" in note for note in notes["stacked_experts"])
    assert any("not expert-parallel" in note for note in notes["parallel_plan"])
    assert "left_alone={" in generated.text and "layer(state).clamp(-1, 1)" in generated.text


BALANCE = """
def load_balancing_loss_func(gate_logits, num_experts, top_k=2):
    routing_weights, selected = torch.topk(torch.cat(gate_logits, dim=0), top_k, dim=-1)
    counted = nn.functional.one_hot(selected, num_experts).sum(dim=-2).float()
    return torch.mean(counted * routing_weights.softmax(dim=-1).mean(dim=-1, keepdim=True)) * num_experts**2


class ListMoeForCausalLM("""


def test_a_router_loss_of_no_known_form_stays_and_is_told(tmp_path: Path):
    """It refuses nothing; what it computes over several ranks is the proof's to say, and the note says where it stands."""
    code = FORMS["Mixtral"].write(tmp_path)
    file = code / "modeling_list_moe.py"
    text = file.read_text().replace("\nclass ListMoeForCausalLM(", BALANCE)
    added = "        loss = None\n        balance = load_balancing_loss_func((logits,), self.vocab_size)\n"
    file.write_text(text.replace("        loss = None\n", added))
    generated = pipeline.generate(load("list_moe", source=code))
    (note,) = next(step.outcome.notes for step in generated.steps if step.name == "router_loss")
    assert (
        note.startswith("load_balancing_loss_func counts the choices of a softmax (line ") and "several ranks" in note
    )
    assert "balance = load_balancing_loss_func(" in generated.text and "ops.router" not in generated.text


def generated_from(code: Path) -> registry.GeneratedModel:
    generation.generate(["list_moe"], False, None, code, code.parent / "generated", dry_run=False, force=False)
    found = registry.read_model(code.parent / "generated" / "list_moe")
    return replace(found, source=found.find_source(code))


@pytest.mark.slow  # ten proofs of small models
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_proven(name: str, tmp_path: Path):
    model = generated_from(FORMS[name].write(tmp_path))
    proof = verify_model(model, variants=("base",), implementations=())
    expected = verdict.PROVEN if FORMS[name].is_trained else verdict.EAGER_ONLY
    assert verdict.of(proof).status == expected, verdict.of(proof).words
    assert json.loads((model.directory / "provenance.json").read_text())["passes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.has_experts and form.is_trained])
def test_two_ranks_share_the_experts_of_a_form(name: str, tmp_path: Path, two_ranks):
    model = generated_from(FORMS[name].write(tmp_path))
    results = media_ranks.verify_on_ranks(model, two_ranks, sp=1, ep=2, fsdp=True, cases=("text",))
    assert [(one.case, one.reason) for one in results] == [("text", "")]
