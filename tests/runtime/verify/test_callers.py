"""What callers other than patchgen's trainer pass, and that a step leaves their batch as it was."""

from __future__ import annotations

import functools

import pytest
from stand_in import upstream_head, write_stand_in

from patchgen.kernels.loss.causal_lm_loss import chunked_causal_lm_loss
from patchgen.runtime import seams
from patchgen.runtime.verify.inputs import IGNORED, ITEMS_OF_STEP, NUM_ITEMS, OTHER_CALLER, SHIFTED, caller_cases
from patchgen.runtime.verify.proof import LARGE_WEIGHTS
from patchgen.runtime.verify.seam_proof import FAILED
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.verify_model import verify_model

LOSS = "vocab_size=self.config.vocab_size, **kwargs)"
HEAD = "logits = self.lm_head(hidden_states)\n"
SPOILS_THE_MASK = (HEAD, HEAD + "        if attention_mask is not None:\n            attention_mask.mul_(0)\n")


def without(condition: str) -> tuple[str, str]:
    """The loss without those of its arguments for which this is true."""
    return LOSS, f"vocab_size=self.config.vocab_size, **{{k: v for k, v in kwargs.items() if not ({condition})}})"


def proof_with(tmp_path, edit, **options):
    folder = write_stand_in(tmp_path, "llama", edits=(edit,))
    return verify_model(folder, variants=("base",), implementations=(), **options)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(without("k == 'num_items_in_batch' and isinstance(v, int)"), id="items as an int"),
        pytest.param(without("k == 'shift_labels'"), id="labels shifted by the caller"),
        pytest.param(
            (HEAD, HEAD + "        if attention_mask is not None and not attention_mask[:, 0].all():\n"
                          "            logits = logits * 1.01\n"),
            id="padding on the left",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_for_another_caller_only_is_seen(tmp_path, edit):
    proof = proof_with(tmp_path, edit, training_path=False)
    assert proof.failures and all(failure.startswith("case other caller, ") for failure in proof.failures)


def test_a_kernel_that_ignores_what_another_caller_passes_fails(tmp_path):
    def ignores_ints(*arguments, num_items_in_batch=None, **options):
        number = None if isinstance(num_items_in_batch, int) else num_items_in_batch
        return chunked_causal_lm_loss(*arguments, num_items_in_batch=number, **options)

    with seams.registered({"causal_lm_loss": ignores_ints}, "planted"):
        proof = verify_model("llama", variants=("base",), implementations=("planted",), training_path=False)
    (loss,) = (result for result in proof.seams if result.seam == "causal_lm_loss")
    assert loss.status == FAILED and loss.reason.startswith("beyond 1e-04: loss")


def test_a_batch_that_a_step_changes_is_a_failure(tmp_path):
    proof = proof_with(tmp_path, SPOILS_THE_MASK, training_path=False)
    changes = "the step changes its caller's 'attention_mask' in place, upstream's does not."
    assert proof.failures == [f"case {name}, variant base: {changes}" for name in ("padded", "other caller")]
    assert all(case.gradient.is_equal for case in proof.cases), "no number shows it"


def test_a_batch_that_upstreams_step_changes_as_well_is_told(tmp_path, monkeypatch):
    upstream = upstream_head("llama")
    forward = upstream.forward

    @functools.wraps(forward)
    def spoiling(self, *arguments, attention_mask=None, **options):
        output = forward(self, *arguments, attention_mask=attention_mask, **options)
        if attention_mask is not None:
            attention_mask.mul_(0)
        return output

    folder = write_stand_in(tmp_path, "llama", edits=(SPOILS_THE_MASK,))
    monkeypatch.setattr(upstream, "forward", spoiling)
    proof = verify_model(folder, variants=("base",), implementations=(), training_path=False)
    assert proof.failures == []
    assert list(proof.changed_inputs) == ["attention_mask"]


def refuses(output):
    raise ValueError("no such caller")


def without_finite_gradients(output):
    """The loss stays what it is: a square root has no derivative at zero."""
    output.loss = output.loss + (output.loss * 0).sqrt()
    return output


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (refuses, "upstream's own class fails: no such caller."),
        (without_finite_gradients, "upstream's own gradients are not finite."),
    ],
)
@pytest.mark.parametrize("name", [OTHER_CALLER, LARGE_WEIGHTS])
def test_what_upstream_cannot_compute_is_told_and_no_failure(tmp_path, monkeypatch, name, spoiled, reason):
    upstream = upstream_head("llama")
    forward = upstream.forward

    @functools.wraps(forward)
    def spoiling(self, *arguments, **options):
        is_large = float(self.lm_head.weight.detach().abs().max()) > 1
        output = forward(self, *arguments, **options)
        is_this = is_large if name == LARGE_WEIGHTS else isinstance(options.get(NUM_ITEMS), int)
        return spoiled(output) if is_this and output.loss is not None else output

    folder = write_stand_in(tmp_path, "llama")
    monkeypatch.setattr(upstream, "forward", spoiling)
    proof = verify_model(folder, variants=("base",), implementations=("chunked",))
    assert proof.is_proven, (proof.failures, proof.training)
    assert proof.left_out == {name: reason} and name not in {case.name for case in proof.cases}
    assert (SHIFTED in proof.inputs) == (name != OTHER_CALLER)
    assert (name in proof.training.left_out) == (name == LARGE_WEIGHTS)


def test_cases_of_callers_differ_from_what_a_model_would_make_of_labels_alone():
    head = upstream_head("llama")
    (case,) = caller_cases(small_config(head.config_class).config, head)
    labels, mask = case.batch["labels"], case.batch["attention_mask"]
    assert (labels[mask == 0] == IGNORED).all()
    assert not mask[1, 0] and mask[0].all()
    assert case.batch[NUM_ITEMS] == ITEMS_OF_STEP != int((case.batch[SHIFTED] != IGNORED).sum())
    assert not (case.batch[SHIFTED] == labels.roll(-1, dims=1)).all()
