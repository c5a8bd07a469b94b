"""Verdicts on changed sources: drawn ones are refused, told or equal, and a generator that reads another source is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from patchgen import pipeline, upstream
from patchgen.mutation.draw import draw
from patchgen.mutation.edits import Mutant
from patchgen.mutation.rounds import EQUAL, NOT_RUN, REFUSED, TOLD, WRONG, comparisons, try_mutants
from patchgen.mutation.table import summarise
from patchgen.runtime.verify import mutants, told
from patchgen.runtime.verify.changed_modules import changed_module
from patchgen.runtime.verify.changed_upstream import raises_too
from patchgen.runtime.verify.comparison import Step
from patchgen.runtime.verify.inputs import Case
from patchgen.runtime.verify.kept_state import state_kept
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.mutants import Judge
from patchgen.runtime.verify.observe.facts import Fact

# Mutants per model: dense, with images, dense, with convolutions, with experts. Their files are read quickly, and in this order
# two processes take equally long.
DRAWN = {"llama": 35, "smolvlm": 45, "olmo2": 35, "lfm2": 45, "mixtral": 40}


@pytest.mark.parametrize("model", DRAWN)
def test_drawn_mutants_are_refused_told_or_equal(model: str):
    rows = list(try_mutants(model, seed=0, count=DRAWN[model], observes=False))
    summary = summarise(rows)
    assert summary["wrong"] == []
    # Those that do not run are drawn besides and not counted.
    assert sum(summary["verdicts"].get(kind, 0) for kind in (EQUAL, REFUSED, TOLD)) == DRAWN[model]


def edited(text: str, old: str, new: str) -> Mutant:
    assert old in text
    return Mutant("edited", "", f"{old} -> {new}", text.replace(old, new), False)


def test_a_generator_that_reads_another_source_is_told_by_the_proof_and_wrong_where_that_is_blind(monkeypatch):
    """The change of the mutant is left out of what is generated, as a pass that drops something would."""
    origin = upstream.load("llama")
    judge = Judge(origin)
    lines = judge.executed()
    generate = pipeline.generate
    monkeypatch.setattr(
        pipeline, "generate", lambda changed, config: generate(replace(changed, text=origin.text), config)
    )
    scaled = [m for m in draw(origin.text, 0, lambda a, b: any(a <= n <= b for n in lines)) if m.operator == "scaled"]
    verdicts = [judge.verdict(mutant) for mutant in scaled[:4]]
    assert {verdict.kind for verdict in verdicts} <= {TOLD, NOT_RUN}, verdicts
    assert any(verdict.by == told.PROOF and "differs by" in verdict.differs for verdict in verdicts), verdicts
    monkeypatch.setattr(told, "findings", lambda *_classes, **_options: told.Findings())
    verdicts = [judge.verdict(mutant) for mutant in scaled[:4]]
    assert WRONG in {verdict.kind for verdict in verdicts}, verdicts
    assert any("differs by" in verdict.detail for verdict in verdicts)


def test_a_head_that_returns_a_tuple_is_not_run():
    """A fused loss leaves out the logits, so that nothing in it has the place that upstream's has."""
    origin = upstream.load("llama")
    before, returned, after = origin.text.partition("        return CausalLMOutputWithPast(\n            loss=loss,")
    values, end, after = after.partition("        )\n")
    text = (
        before
        + returned.replace("CausalLMOutputWithPast(", "tuple(dict(")
        + values
        + end.replace(")", ").values())")
        + after
    )
    found = Judge(origin).verdict(Mutant("edited", "", "", text, False))
    assert found.kind == NOT_RUN and "tuple" in found.detail, found


def test_what_only_long_rows_show_differs(monkeypatch):
    origin = upstream.load("llama")
    judge = Judge(origin)
    generate = pipeline.generate
    monkeypatch.setattr(
        pipeline, "generate", lambda changed, config: generate(replace(changed, text=origin.text), config)
    )
    norm = "        input_dtype = hidden_states.dtype\n"
    scaled = f"{norm}        if hidden_states.shape[-2] > 128:\n            hidden_states = hidden_states + 1\n"
    found = judge.verdict(edited(origin.text, norm, scaled))
    assert found.differs.startswith("step"), found


def test_what_only_the_seams_or_the_number_of_labels_show_differs(monkeypatch):
    """Eager on plain rows both changes of the generated file are equal: one is of the weight that the norm's kernel gets, the
    other drops the arguments of a step, among them the number of labels."""
    origin = upstream.load("llama")
    judge = Judge(origin)
    generate = pipeline.generate

    def difference_after(old: str, new: str) -> str:
        """What differs once this text of the generated file is replaced."""

        def generate_changed(source, config):
            made = generate(source, config)
            assert old in made.text
            return replace(made, text=made.text.replace(old, new))

        monkeypatch.setattr(pipeline, "generate", generate_changed)
        return judge.verdict(Mutant("none", "", "", origin.text + "\n", True)).differs

    norm, loss = (
        "ops.rms_norm(hidden_states, self.weight, ",
        "            vocab_size=self.config.vocab_size,\n            **kwargs,",
    )
    assert ", seams: " in difference_after(norm, norm.replace("self", "2 * self"))
    assert "step, eager: " in difference_after(loss, loss.replace("            **kwargs,", ""))


def test_the_parts_of_a_composed_model_are_the_changed_ones():
    """`AutoModel` builds the text model: of the changed file, or the change would reach the generated one alone."""
    judge = Judge(upstream.load("gemma3"))
    scaled = edited(
        judge.origin.text, "hidden_states = self.norm(hidden_states)", "hidden_states = 2 * self.norm(hidden_states)"
    )
    assert judge.verdict(scaled).kind == EQUAL
    from transformers.models import gemma3

    assert gemma3.Gemma3TextModel.__module__ == judge.origin.module


def test_a_change_of_upstreams_loop_over_images_alone_is_equal():
    """Upstream has a loop over images and a form with lengths. Only the loop changes, and a run uses lengths in both."""
    judge = Judge(upstream.load("qwen2_vl"))
    scaled = edited(judge.origin.text, "torch.cat(attn_outputs, dim=1)", "torch.cat(attn_outputs, dim=1) * 1.25")
    assert judge.verdict(scaled).kind == EQUAL


def test_what_raises_or_is_not_finite_upstream_does_not_run():
    judge = Judge(upstream.load("llama"))
    old = "hidden_states = self.norm(hidden_states)"
    steep = f"{old}; hidden_states = hidden_states + (hidden_states.detach() - hidden_states).pow(2).sum().sqrt()"
    for new in ("hidden_states = self.norm(missing)", f"{old} * float('nan')", steep):
        verdict = judge.verdict(edited(judge.origin.text, old, new))
        assert verdict.kind == NOT_RUN, (new, verdict)


def test_a_file_of_which_nothing_can_be_compared_is_refused(monkeypatch):
    """Without a comparison every mutant would be equal."""
    monkeypatch.setattr(mutants, "_difference", lambda *_arguments: "loss differs by 1.0e+00")
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be compared: plain, eager: loss differs by"):
        Judge(upstream.load("llama"))


def test_a_device_that_fails_says_nothing_about_a_mutant(monkeypatch):
    def no_memory(*_arguments: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(mutants, "train_step", no_memory)
    model = torch.nn.Identity()
    model.set_attn_implementation = lambda _name: None
    case, step = Case("plain", {}), Step({}, {})
    with pytest.raises(torch.OutOfMemoryError):
        mutants._difference(mutants.Check("eager", case, "plain"), model, model, step, (case,))
    with pytest.raises(torch.OutOfMemoryError):
        mutants._agree_in_double(mutants.Check("seams", case, "plain"), model, model, case)
    with pytest.raises(torch.OutOfMemoryError):
        raises_too(no_memory, ValueError("another"))


def test_memory_that_nobody_wrote_is_told_from_a_fault_of_ours():
    """What it holds differs from run to run, so a difference proves nothing."""
    judge = Judge(upstream.load("llama"))
    old = "hidden_states = self.norm(hidden_states)"
    part = (
        "x = torch.empty_like(hidden_states); x[..., 1:].copy_(hidden_states[..., 1:]); hidden_states = self.norm(x)"
    )
    for text, expected in ((judge.origin.text, False), (edited(judge.origin.text, old, part).text, True)):
        with changed_module(judge.origin.module, text, {}) as module:
            model = build_model(getattr(module.load(), judge.head), judge._small)
            assert judge._reads_uninitialised_memory(model) is expected
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_step_that_no_run_could_take_upstream_either_is_told_as_one_that_was_not_observed():
    """Fused attention keeps its output for the backward, the formula does not: changed in place it ends in torch's error."""
    judge = Judge(upstream.load("llama"))
    made = "attn_output = attn_output.reshape(*input_shape, -1).contiguous()"
    found = judge.verdict(edited(judge.origin.text, made, f"{made}; attn_output *= 1.25"))
    assert found.kind == TOLD and found.by == told.FACT and "could not be observed" in found.detail, found


def test_what_float64_shows_to_be_rounding_is_equal():
    """A norm's weight is divided by its normalised input: attention's scores get so large that fp32 loses their differences."""
    judge = Judge(upstream.load("qwen2_moe"))
    product = "self.weight * hidden_states.to(input_dtype)"
    assert judge.verdict(edited(judge.origin.text, product, product.replace("*", "/"))).kind == EQUAL


def test_an_error_that_is_ours_alone_is_told(monkeypatch):
    """Only the generated file raises: the generator is handed the source with a wrong shape in it."""
    judge = Judge(upstream.load("llama"))
    made = "attn_output = attn_output.reshape(*input_shape, -1).contiguous()"
    mutant = edited(judge.origin.text, made, f"{made}; attn_output *= 1.25")
    generate = pipeline.generate
    wrong_shape = "attn_output.reshape(*input_shape, 7)"
    monkeypatch.setattr(
        pipeline,
        "generate",
        lambda source, config: generate(
            replace(source, text=source.text.replace("attn_output.reshape(*input_shape, -1)", wrong_shape)), config
        ),
    )
    found = judge.verdict(mutant)
    assert found.kind == TOLD and "7" in found.differs, found


def test_each_case_starts_from_the_state_that_the_model_was_built_with():
    """Both models count their calls, and the judge calls the generated one more often."""
    judge = Judge(upstream.load("llama"))
    old = "hidden_states = self.norm(hidden_states)"
    counted = f"{old}\n        self.calls = getattr(self, 'calls', 0) + 1\n        hidden_states = hidden_states * self.calls"
    found = judge.verdict(edited(judge.origin.text, old, counted))
    assert found.kind == TOLD and "'calls'" in found.detail and not found.differs, found


@pytest.mark.parametrize(
    "code",
    [
        "hidden_states = hidden_states * max(1.0, hidden_states.shape[1] / 8192)",
        # A layer, which FSDP gathers: the ranks that run it wait for the others.
        "if hidden_states.max() > 1e4: self.layers[0](hidden_states, position_embeddings=position_embeddings)",
    ],
)
def test_what_no_comparison_shows_is_told_by_an_observed_fact(code: str):
    judge = Judge(upstream.load("llama"))
    old = "        hidden_states = self.norm(hidden_states)\n"
    found = judge.verdict(edited(judge.origin.text, old, f"        {code}\n{old}"))
    assert found.kind == TOLD and found.by == told.FACT and code in found.detail, found


def test_what_the_proof_says_of_the_unchanged_file_is_not_told_of_a_change():
    fact = Fact("length", 3, "x = x * x.shape[1]", "a length is an operand of mul", "it is computed from the length")
    usual = told.Findings(facts=(fact,))
    assert told.beyond(told.Findings(facts=(replace(fact, line=7),)), usual) is None
    assert told.beyond(told.Findings(facts=(replace(fact, code="x = x * 2"),)), usual).by == told.FACT
    failed = told.Findings("proven, eager only: causality fails.")
    assert told.beyond(failed, failed) is None and told.beyond(failed, usual).by == told.PROOF


def test_nothing_that_a_forward_keeps_is_left_after_a_step():
    class Keeping(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("load", torch.zeros(2))
            self.alias, self.kept, self.first = self.load, {"calls": [0]}, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first, self.second = x, x.mean()
            self.kept["calls"][0] += 1
            self.load.add_(x.detach().mean())
            self.load = self.load + x.mean()
            self.register_forward_hook(lambda module, arguments, output: output * 2)
            self.weight.data.mul_(2)
            return super().forward(x)

    model = torch.nn.Sequential(Keeping())
    part, x = model[0], torch.ones(1, 2)
    weight = part.weight.detach().clone()
    results = []
    for _ in range(2):
        with state_kept(model):
            results.append(model(x).detach())
    assert torch.equal(*results) and torch.equal(part.weight, weight)
    assert part.kept == {"calls": [0]} and part.first is None and not hasattr(part, "second")
    assert not part.load.any() and part.alias is part.load and not part._forward_hooks
    assert list(model.state_dict()) == ["0.weight", "0.bias", "0.load"]


def test_the_labels_of_a_run_are_those_that_the_changed_head_compares_its_logits_with():
    """A head that shifts no labels gets them as upstream's does, also in a packed row."""
    judge = Judge(upstream.load("llama"))
    built = "        self.vocab_size = config.vocab_size\n        self.lm_head"
    verdict = judge.verdict(edited(judge.origin.text, built, f'        self.loss_type = "ForMaskedLM"\n{built}'))
    assert verdict.kind == EQUAL and "packed, run" in verdict.compared, verdict


def test_an_equal_verdict_says_what_was_compared_and_what_was_not():
    judge = Judge(upstream.load("llama"))
    verdict = judge.verdict(Mutant("none", "", "", judge.origin.text + "\n", True))
    assert {"plain, eager", "step, seams", "packed, run"} <= set(verdict.compared) and not verdict.left_out
    old = "hidden_states = self.norm(hidden_states)"
    unpacked = f"{old}\n        if 'cu_seq_lens_q' in kwargs:\n            raise RuntimeError('one document')"
    verdict = judge.verdict(edited(judge.origin.text, old, unpacked))
    assert verdict.kind == EQUAL and "packed, run" not in verdict.compared, verdict
    assert "RuntimeError: one document" in verdict.left_out["packed, run"]
    row = comparisons(verdict, "ranks_")
    assert row == {"ranks_compared": list(verdict.compared), "ranks_left_out": dict(verdict.left_out)}
    assert comparisons(mutants.Verdict(WRONG)) == {}
