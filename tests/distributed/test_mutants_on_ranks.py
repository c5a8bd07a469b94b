"""A mutant on two ranks: equal, refused before a step, or wrong where the generated file leaves the change out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from patchgen import pipeline, upstream
from patchgen.mutation.edits import Mutant
from patchgen.runtime.verify import mutants, mutants_on_ranks
from patchgen.runtime.verify.mutants_on_ranks import Subject
from patchgen.runtime.verify.ranks import CaseFailed, RankPool

RESIDUAL = "residual = hidden_states"
PROJECTED = "hidden_states = self.norm(hidden_states)"


@pytest.fixture(scope="module")
def judge() -> mutants.Judge:
    return mutants.Judge(upstream.load("mixtral"))


def subject(judge: mutants.Judge, new: str, generated_from: str | None = None, old: str = PROJECTED) -> Subject:
    origin = judge.origin
    assert old in origin.text
    text = origin.text.replace(old, new)
    verdict = judge.verdict(Mutant("edited", "", "", text, False))
    assert verdict.kind == mutants.EQUAL, verdict
    files = dict(verdict.files) if generated_from is None else pipeline.generate(origin).files
    return Subject(origin.module, judge.head, text, {}, files)


def test_the_same_change_on_both_sides_is_equal(two_ranks, judge):
    scaled = subject(judge, f"{PROJECTED} * 1.25")
    assert mutants_on_ranks.verdict(two_ranks, scaled).kind == mutants.EQUAL


def test_a_change_that_the_generated_file_lacks_is_wrong(two_ranks, judge):
    found = mutants_on_ranks.verdict(two_ranks, subject(judge, f"{PROJECTED} * 1.25", generated_from="upstream"))
    assert found.kind == mutants.WRONG and found.detail.startswith("2 ranks, sp 2, whole parameters, plain: "), found


def test_tokens_that_are_mixed_without_attention_are_refused_at_the_start(two_ranks, judge):
    rolled = mutants_on_ranks.verdict(two_ranks, subject(judge, f"{PROJECTED}.roll(1, -2)"))
    assert rolled.kind == mutants.REFUSED and rolled.by == "runtime/parallel/selfcheck.py", rolled


MASKED = "\n        if attention_mask is not None:\n            hidden_states = hidden_states * "


def test_what_reads_the_mask_of_padded_rows_is_compared(two_ranks, judge):
    """A slice has another number of tokens than the sequence; what padded rows alone show, and the generated file lacks."""
    by_length = subject(judge, f"{PROJECTED}{MASKED}attention_mask.sum(1)[:, None, None]")
    verdict = mutants_on_ranks.verdict(two_ranks, by_length)
    assert verdict.kind == mutants.REFUSED and "rows with padding" in verdict.detail, verdict
    verdict = mutants_on_ranks.verdict(
        two_ranks, subject(judge, f"{PROJECTED}{MASKED}(2 - attention_mask.min())", generated_from="upstream")
    )
    assert verdict.kind == mutants.WRONG and verdict.detail.startswith("2 ranks, sp 2, whole parameters, text: "), (
        verdict
    )


@pytest.mark.slow
def test_documents_that_a_run_separates_are_separated(two_ranks):
    """Packed rows on ranks are compared then, on slices too."""
    judge = mutants.Judge(upstream.load("deepseek_v4"))
    files = pipeline.generate(judge.origin).files
    verdict = mutants_on_ranks.verdict(
        two_ranks, Subject(judge.origin.module, judge.head, judge.origin.text, {}, files)
    )
    assert verdict.kind == mutants.EQUAL and "2 ranks, sp 1, FSDP, packed" in verdict.compared, verdict
    assert "2 ranks, sp 2, whole parameters, packed" in verdict.compared, verdict


@pytest.mark.slow
def test_a_mutant_that_needs_labels_is_not_run(two_ranks, judge):
    """The checks at the start of a run have none, and fail as upstream's own file does."""
    verdict = mutants_on_ranks.verdict(two_ranks, subject(judge, "", old="        loss = None\n"))
    assert verdict.kind == mutants.NOT_RUN and "UnboundLocalError" in verdict.detail, verdict


def test_what_fsdp_refuses_of_upstream_too_is_no_fault_of_ours(two_ranks, judge):
    """A change in place of a layer's input, which FSDP2 hooks: an error in both files, or in the generated one alone."""
    in_place = subject(judge, f"{RESIDUAL}; residual *= 1.0", old=RESIDUAL)
    verdict = mutants_on_ranks.verdict(two_ranks, in_place)
    assert verdict.kind in (mutants.EQUAL, mutants.NOT_RUN), verdict
    verdict = mutants_on_ranks.verdict(two_ranks, replace(in_place, text=judge.origin.text))
    assert verdict.kind == mutants.WRONG and "FSDP" in verdict.detail and "inplace" in verdict.detail, verdict


MERGED = "merged_hidden_states = self.merger(hidden_states)"
FILLED = "inputs_embeds = inputs_embeds.masked_scatter(image_mask, image_embeds)"


@pytest.mark.slow
def test_code_that_counts_placeholders_is_refused_at_the_start(two_ranks):
    """A slice has another share of them than the sequence, or none."""
    judge = mutants.Judge(upstream.load("qwen2_vl"))
    line = "\n            inputs_embeds = "
    halved = f"{FILLED}{line}torch.where(image_mask.any(1, True), inputs_embeds * 0.5, inputs_embeds)"
    for new in (f"{FILLED} * (1 + image_mask.float().mean())", halved):
        verdict = mutants_on_ranks.verdict(two_ranks, subject(judge, new, old=FILLED))
        assert verdict.kind == mutants.REFUSED and verdict.by == "runtime/parallel/selfcheck.py", (new, verdict)
    moved = f"{MERGED}[None]\n        merged_hidden_states = merged_hidden_states[0]"
    assert mutants_on_ranks.verdict(two_ranks, subject(judge, moved, old=MERGED)).kind == mutants.EQUAL


@pytest.mark.slow
def test_documents_that_one_process_computes_together_are_no_fault_of_ranks(two_ranks):
    """All tokens of a row are scaled if it has an image: a document of text alone is not."""
    judge, filled = mutants.Judge(upstream.load("gemma3")), FILLED.replace("image_mask", "special_image_mask")
    filled = filled.replace("image_embeds", "image_features")
    verdict = mutants_on_ranks.verdict(two_ranks, subject(judge, f"{filled} * 1.25", old=filled))
    assert verdict.kind == mutants.EQUAL and "computes the documents of a row together" in verdict.detail, verdict


@pytest.mark.slow
def test_a_mutant_that_fails_on_packed_rows_is_compared_on_others(two_ranks, judge):
    """Lengths of documents fail in one process, too: that says nothing about rows of one document."""
    unpacked = f"{PROJECTED}\n        if kwargs.get('cu_seq_lens_q') is not None:\n            raise RuntimeError('one document')"
    verdict = mutants_on_ranks.verdict(two_ranks, subject(judge, unpacked))
    assert verdict.kind == mutants.EQUAL and len(verdict.compared) == 4, verdict
    assert not any(place.endswith(", packed") for place in verdict.compared)
    assert "one document" in verdict.left_out["packed"] and verdict.detail.startswith(
        "packed: upstream's changed class"
    )
    lacking = subject(judge, f"{unpacked}\n        hidden_states = hidden_states * 1.25", generated_from="upstream")
    assert mutants_on_ranks.verdict(two_ranks, lacking).kind == mutants.WRONG


def test_a_mask_of_ones_is_no_mask_on_ranks(two_ranks, judge):
    """The samples of the reference have one, the rows of a run have not: code that asks for a mask finds none in either."""
    asked = subject(
        judge, f"{PROJECTED}\n        if attention_mask is not None:\n            hidden_states = hidden_states * 1.25"
    )
    assert mutants_on_ranks.verdict(two_ranks, asked).kind == mutants.EQUAL


def test_each_case_on_ranks_starts_from_the_state_that_the_model_was_built_with(judge, monkeypatch):
    """The reference is asked several times before its step: a model that counts its calls would hold another number. One whose
    result depended on it would be told before."""
    counted = f"{PROJECTED}\n        self.calls = getattr(self, 'calls', 0) + 1"
    calls = []

    def counts(reference, *_arguments: object, **_options: object) -> mutants.Verdict:
        reference.positions({"input_ids": reference.builder.drawable[:8][None]})
        inputs = dict.fromkeys(("input_ids", "labels"), reference.builder.drawable[None, :8])
        reference.loss_and_gradients([inputs])
        calls.append(getattr(reference.model.model, "calls", 0))
        return mutants.Verdict(mutants.EQUAL)

    monkeypatch.setattr(mutants_on_ranks, "_compare_layout", counts)
    assert mutants_on_ranks.compare(subject(judge, counted)).kind == mutants.EQUAL
    assert set(calls) == {0}


@pytest.mark.slow  # the other rank waits for gloo's limit
def test_an_error_on_one_rank_alone_is_wrong(judge):
    """The other rank waits in the step that failed, so upstream is asked without it."""
    scaled = subject(judge, f"{PROJECTED} * 1.25")
    name = next(name for name, text in scaled.files.items() if PROJECTED in text)
    failing = (
        "if torch.distributed.get_rank() == 1 and type(self.layers[0]).__name__.startswith('FSDP'): raise RuntimeError('a shape'); "
        + PROJECTED
    )
    text = scaled.files[name].replace(PROJECTED, failing.replace("; ", "\n        "))
    pool = RankPool(2)
    try:
        verdict = mutants_on_ranks.verdict(pool, replace(scaled, files={**scaled.files, name: text}))
        assert mutants_on_ranks.verdict(pool, scaled).kind == mutants.EQUAL  # by ranks that are in step again
    finally:
        pool.close()
    assert verdict.kind == mutants.WRONG, verdict


def test_a_mutant_that_no_layout_compares_is_not_run(judge, monkeypatch):
    skipped = mutants.Verdict(mutants.NOT_RUN, "no inputs")
    monkeypatch.setattr(mutants_on_ranks, "_compare_layout", lambda *_, **__: skipped)
    verdict = mutants_on_ranks.compare(subject(judge, f"{PROJECTED} * 1.25"))
    assert verdict.kind == mutants.NOT_RUN and "no inputs" in verdict.detail, verdict


def test_a_device_that_fails_says_nothing_about_a_mutant(judge, monkeypatch):
    def no_memory(*_arguments: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(mutants_on_ranks, "_Reference", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        mutants_on_ranks.compare(subject(judge, f"{PROJECTED} * 1.25"))
    monkeypatch.setattr(mutants_on_ranks, "training_config", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        mutants_on_ranks._takes_training_rows(LlamaForCausalLM)


@pytest.mark.parametrize(
    ("is_inconclusive", "results", "kind"),
    [
        (True, (), mutants.NOT_RUN),
        (False, (), mutants.WRONG),
        (True, (mutants.Verdict(mutants.WRONG, "a shape"),), mutants.WRONG),
        (True, (mutants.Verdict(mutants.EQUAL),), mutants.NOT_RUN),
        (True, (mutants.Verdict(mutants.REFUSED),), mutants.REFUSED),
        (False, (mutants.Verdict(mutants.REFUSED),), mutants.WRONG),
    ],
)
def test_ranks_that_fail_give_no_verdict_unless_one_of_them_has_one(
    monkeypatch, judge, is_inconclusive, results, kind
):
    def failing(*_arguments: object, **_options: object) -> None:
        raise CaseFailed("rank 0:\nRuntimeError: none left", is_inconclusive=is_inconclusive, results=results)

    pool = RankPool(2)
    monkeypatch.setattr(pool, "run", failing)
    nothing = Subject(judge.origin.module, judge.head, "", {}, {})
    assert mutants_on_ranks.verdict(pool, nothing).kind == kind


@pytest.mark.parametrize(("times", "kind"), [(1, mutants.EQUAL), (2, mutants.WRONG)])
def test_ranks_that_wait_for_each_other_twice_are_wrong(monkeypatch, judge, times, kind):
    """Once, the machine may have been busy."""
    asked = []

    def waiting(pool: RankPool, *_arguments: object, timeout: float) -> list[mutants.Verdict]:
        asked.append((timeout, pool.collective_timeout))
        if len(asked) <= times:
            raise CaseFailed("ranks [0, 1] did not end", is_inconclusive=True, has_waited=True)
        return [mutants.Verdict(mutants.EQUAL)] * 2

    monkeypatch.setattr(RankPool, "run", waiting)
    found = mutants_on_ranks.verdict(RankPool(2), Subject(judge.origin.module, judge.head, "", {}, {}))
    assert found.kind == kind and len(asked) == 2
    assert all(second > first for first, second in zip(*asked, strict=True))


@pytest.mark.parametrize(("rest", "kind"), [(mutants.EQUAL, mutants.REFUSED), (mutants.WRONG, mutants.WRONG)])
def test_the_layouts_after_one_that_is_refused_are_compared(monkeypatch, judge, rest, kind):
    asked = []

    def answering(_case: object, _subject: object, layouts: tuple, **_options: object) -> list[mutants.Verdict]:
        asked.append(layouts)
        if len(asked) == 1:
            return [mutants.Verdict(mutants.REFUSED, f"{layouts[0].name}, plain: tokens are mixed")] * 2
        return [mutants.Verdict(rest)] * 2

    pool = RankPool(2)
    monkeypatch.setattr(pool, "run", answering)
    found = mutants_on_ranks.verdict(pool, Subject(judge.origin.module, judge.head, "", {}, {}))
    assert found.kind == kind and asked == [mutants_on_ranks.LAYOUTS, mutants_on_ranks.LAYOUTS[1:]]


@pytest.mark.parametrize(
    ("computes", "is_dependent"),
    [
        (lambda ids, training: ids * (1 + training), False),
        (lambda ids, training: ids + ids[:1], True),  # later rows see the first
        (lambda ids, training: ids + ids[-1:], True),
        (lambda ids, training: ids + training * ids.mean(), True),
    ],
)
def test_rows_that_see_others_are_found_in_either_direction_and_mode(computes, is_dependent):
    reference: Any = SimpleNamespace(logits=lambda rows, *, training: computes(rows["input_ids"].double(), training))
    rows = {"input_ids": torch.arange(12).reshape(4, 3)}
    assert mutants_on_ranks._rows_are_dependent(reference, rows) == is_dependent
