"""The path of a run is compared with upstream's: what only goes wrong there is seen, one planted defect each."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import transformers
from stand_in import write_stand_in
from transformers import Kosmos2ForConditionalGeneration
from transformers.loss.loss_utils import ForCausalLMLoss

from patchgen.kernels.loss.causal_lm_loss import chunked_causal_lm_loss
from patchgen.kernels.loss.chunking import largest_chunk, within_limit
from patchgen.kernels.loss.linear_cross_entropy import linear_causal_lm_loss
from patchgen.runtime import registry, seams
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.verify import code_sets, training_inputs, verdict
from patchgen.runtime.verify.comparison import Step, compare_gradients
from patchgen.runtime.verify.conditioning import beyond_rounding, is_rounding
from patchgen.runtime.verify.report import read_training, write_proof
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.training_checks import Comparison
from patchgen.runtime.verify.training_path import TrainingPath, find_attention_kinds, prove_training_path
from patchgen.runtime.verify.verify_model import verify_model

# What a file can do under other names than upstream's: each is bit for bit upstream's with eager attention on one process.
SEES_THE_FUTURE = (
    "            attention_mask,\n            dropout",
    "            attention_mask if self.config._attn_implementation == 'eager' else None,\n"
    "            is_causal=self.config._attn_implementation == 'eager',\n"
    "            dropout",
)
LEAKS = (
    "        attn_output, attn_weights = attention_interface(",
    "        if self.config._attn_implementation != 'eager':\n"
    "            attention_mask = None\n"
    "            kwargs = {name: value for name, value in kwargs.items() if 'seq_lens' not in name}\n"
    "        attn_output, attn_weights = attention_interface(",
)
FORGETS_DOCUMENTS = (  # and keeps the mask of padding: each document in a row of its own would be right
    "        attn_output, attn_weights = attention_interface(",
    "        if self.config._attn_implementation != 'eager':\n"
    "            kwargs = {name: value for name, value in kwargs.items() if 'seq_lens' not in name}\n"
    "            if hasattr(attention_mask, 'definition'):\n"
    "                import dataclasses\n"
    "                forgotten = dict(cu_seq_lens=None, is_packed=False, document=None)\n"
    "                attention_mask = dataclasses.replace(attention_mask, **forgotten)\n"
    "        attn_output, attn_weights = attention_interface(",
)
DROPS_ITEMS = (
    "vocab_size=self.config.vocab_size, **kwargs)",
    "vocab_size=self.config.vocab_size, **{k: v for k, v in kwargs.items() if k != 'num_items_in_batch' "
    "or self.config._attn_implementation == 'eager'})",
)


FORGETS_CHUNKS = (  # of 64 tokens: the third reads nothing of those before it
    "inter_chunk_attn = query[:, :, i] @ last_recurrent_state",
    "inter_chunk_attn = (i < 2) * query[:, :, i] @ last_recurrent_state",
)


def path_of(folder, **options) -> TrainingPath:
    """The comparison of a generated folder's head with the upstream class that it names, small."""
    generated = registry.read_model(folder)
    upstream = getattr(generated.upstream(), generated.heads[0])
    head = getattr(generated.load(), generated.heads[0])
    return prove_training_path(upstream, head, small_config(upstream.config_class).config, **options)


def test_upstreams_own_code_trains_as_upstream(tmp_path):
    path = path_of(write_stand_in(tmp_path, "llama"))
    assert path.reason == ""
    names = [check.name for check in path.checks]
    packed = ["causality", "plain", "leak", "packed", "padded right", "padded left", "chunks", "accumulation"]
    assert names == [*packed, "large weights", "bf16"]
    assert path.attention == path.compared_attention


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        pytest.param(SEES_THE_FUTURE, "a later token changes earlier logits", id="future"),
        pytest.param(LEAKS, "packed rows: other tokens in one document change the logits of others", id="leak"),
        pytest.param(
            FORGETS_DOCUMENTS, "packed rows: other tokens in one document change the logits of others", id="documents"
        ),
        pytest.param(DROPS_ITEMS, "rows of one document: loss differs from upstream's", id="items"),
    ],
)
def test_what_goes_wrong_only_in_a_run_is_not_proven(tmp_path, edit, expected):
    folder = write_stand_in(tmp_path, "llama", edits=(edit,))
    proof = verify_model(folder, variants=("base",), implementations=())
    assert proof.is_equal, "eager, on one process, it is upstream's"
    assert not proof.is_proven
    found = verdict.of(proof)
    assert found.status == verdict.EAGER_ONLY
    assert found.reason.startswith(expected)
    assert found.words == f"proven, eager only: {found.reason}"


def test_what_goes_wrong_only_in_long_documents_is_not_proven(tmp_path):
    folder = write_stand_in(tmp_path, "qwen3_next", edits=(FORGETS_CHUNKS,))
    proof = verify_model(folder, variants=("base",), implementations=())
    assert proof.is_equal and not proof.is_proven
    assert verdict.of(proof).reason.startswith("packed rows: ")


def test_a_loss_that_loses_what_lies_behind_its_first_chunk_is_not_proven():
    def first_chunk(head, hidden_states, labels, *, shift_labels=None, **arguments):
        kept = shift_labels.clone()
        kept.view(-1)[within_limit(kept.numel()) :] = IGNORED
        return chunked_causal_lm_loss(head, hidden_states, labels, shift_labels=kept, **arguments)

    with seams.registered({"causal_lm_loss": first_chunk}, "first chunk"):
        path = path_of(registry.find_model("llama").directory, named_seams={"causal_lm_loss": "first chunk"})
    assert [failure.partition(":")[0] for failure in path.failures] == ["the loss in chunks"]


def test_a_limit_makes_the_losses_cross_bounds_of_chunks():
    torch.manual_seed(0)
    linear, hidden, labels = torch.nn.Linear(8, 11, bias=False), torch.randn(2, 9, 8), torch.randint(11, (2, 9))
    sizes = []

    def head(part):
        sizes.append(part.shape[1])
        return linear(part)

    def losses() -> list[torch.Tensor]:
        options = {"loss_function": ForCausalLMLoss, "vocab_size": 11}
        return [
            chunked_causal_lm_loss(head, hidden, labels, **options)[1],
            linear_causal_lm_loss(linear, hidden, labels, **options)[1],
        ]

    whole = losses()
    with largest_chunk(7):
        parts = losses()
    assert sizes == [18, 7, 7, 4]
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)
    assert within_limit(100) == 100, "the limit holds in the block only"


def test_a_run_that_sees_no_image_is_not_proven_where_upstream_takes_no_text_alone():
    """Rows with images are all that is compared there, and they tell."""

    class Blind(Kosmos2ForConditionalGeneration):
        @functools.wraps(Kosmos2ForConditionalGeneration.forward)
        def forward(self, *args, pixel_values=None, **kwargs):
            seen = pixel_values if self.config._attn_implementation == "eager" else torch.zeros_like(pixel_values)
            return super().forward(*args, pixel_values=seen, **kwargs)

    config = small_config(Kosmos2ForConditionalGeneration.config_class).config
    honest = prove_training_path(Kosmos2ForConditionalGeneration, Kosmos2ForConditionalGeneration, config)
    text = ["plain", "packed", "chunks", "accumulation", "large weights", "bf16"]
    assert [check.name for check in honest.checks] == [*text, "packed images"]
    assert not honest.failures
    blind = prove_training_path(Kosmos2ForConditionalGeneration, Blind, config)
    assert any(failure.startswith("packed images: logits differ") for failure in blind.failures)


def test_features_decide_the_attention(tmp_path):
    head = registry.read_model(write_stand_in(tmp_path, "gpt_oss")).load().GptOssForCausalLM
    asked = {kind.features for kind in find_attention_kinds(head, small_config("gpt_oss").config)}
    assert asked == {("sinks",), ("sliding window", "sinks")}
    path = path_of(tmp_path / "gpt_oss", named_attention="patchgen_sdpa")
    assert path.reason.startswith("attention 'patchgen_sdpa' lacks sinks, which the model needs")


def test_a_reason_is_recorded_and_a_record_holds_for_its_own_file_only(tmp_path):
    folder = write_stand_in(tmp_path, "llama")
    proof = verify_model(folder, variants=("base",), implementations=())
    releases = {"transformers": transformers.__version__, "torch": torch.__version__}
    made_with = code_sets.made_with({"patchgen.runtime.ops:"}, releases)
    record = code_sets.read(write_proof(proof, folder, made_with))
    assert record["status"] == "proven"
    assert set(record["training"]["checks"]["packed"]) == {"loss", "logits", "gradient"}
    file = folder / "modeling_llama.py"
    assert read_training(folder, file, "LlamaForCausalLM") == record["training"]
    assert read_training(folder, file, "LlamaModel") is None
    for other in ({"prover": "other code"}, {"transformers": "5.9.0"}):
        write_proof(proof, folder, {**made_with, **other})
        assert read_training(folder, file, "LlamaForCausalLM") is None, "what proved it is not what trains it"
    write_proof(proof, folder, made_with)
    assert read_training(folder, file, "LlamaForCausalLM") is not None
    file.write_text(file.read_text() + "\n# changed\n")
    assert read_training(folder, file, "LlamaForCausalLM") is None


def test_rounding_is_what_upstream_moves_by_itself():
    def step(value: float) -> Step:
        return Step({"loss": torch.tensor([1.0, value])}, {})

    perturbed = [step(1e-4)]
    assert is_rounding("loss", step(3e-4), step(0.0), perturbed)
    assert not is_rounding("loss", step(1e-2), step(0.0), perturbed)
    assert not is_rounding("loss", step(1e-1), step(0.0), [step(0.5)]), "a discrete choice excuses nothing"


def test_a_gradient_that_cancels_upstream_is_zero_within_a_rounding_error():
    """The scores of a single key have no gradient: upstream's is zero, another order of operations leaves rounding."""

    def step(value: float) -> Step:
        return Step({}, {"score": torch.tensor([value, 0.0]), "value": torch.tensor([2.0])})

    perturbed = [step(0.0)]
    assert is_rounding("gradient of score", step(2e-9), step(0.0), perturbed)
    assert not is_rounding("gradient of score", step(1e-6), step(0.0), perturbed)


def test_a_thousandth_of_a_gradient_below_a_rounding_error_of_the_largest_is_rounding():
    """The gradient of a scalar is a sum over all tokens; three perturbations may hardly move it."""

    def step(value: float) -> Step:
        return Step({}, {"scale": torch.tensor(value), "weight": torch.tensor([2.0])})

    still = [step(3e-5)] * 3
    assert is_rounding("gradient of scale", step(3e-5 + 1e-8), step(3e-5), still)
    assert not is_rounding("gradient of scale", step(3e-5 + 1e-7), step(3e-5), still), "a 300th of it"
    assert not is_rounding("gradient of scale", step(3e-3 + 1e-6), step(3e-3), still), "four rounding errors"


def test_a_gradient_of_nothing_but_rounding_is_equal_and_one_of_a_true_size_is_not():
    """A softmax over positions cancels the gradient of a bias that all positions share."""

    def step(bias: float, value: float = 0.0) -> Step:
        return Step({}, {"bias": torch.tensor([bias, value]), "weight": torch.tensor([1.0])})

    def remaining(actual: Step, expected: Step, upstream: Iterator[Step]) -> set[str]:
        differences = {f"gradient of {name}": d for name, d in compare_gradients(actual, expected).items()}
        return set(beyond_rounding(differences, actual, expected, torch.nn.Module(), lambda _: next(upstream)))

    noise = [step(5e-8, -2e-8), step(-4e-8), step(1e-8)]
    assert remaining(step(9e-8), step(-2e-8), iter(noise)) == set()
    steady = [step(1e-7 + 1e-13)] * 3
    assert remaining(step(0.0), step(1e-7), iter(steady)) == {"gradient of bias"}, "as small, but it stands still"
    flipped = [step(1e-7), step(0.0), step(1e-7)]
    assert remaining(step(-6e-7), step(1e-7), iter(flipped)) == {"gradient of bias"}, "a choice moves it now and then"
    assert remaining(step(1e-3), step(-2e-8), iter(noise)) == {"gradient of bias"}
    assert remaining(step(math.nan), step(-2e-8), iter(noise)) == {"gradient of bias"}
    assert remaining(step(1.0), step(math.inf), iter(noise)) == {"gradient of bias"}


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox"])
def test_the_bias_of_an_answers_scores_is_compared_as_what_it_is_summed_from(tmp_path, model_type):
    head = {"gpt2": "GPT2", "gpt_neox": "GPTNeoX"}[model_type] + "ForQuestionAnswering"
    assert path_of(write_stand_in(tmp_path, model_type, head=head)).failures == ()


@pytest.mark.parametrize("model_type", ["minimax_m3_vl_text", "blt"])
def test_padding_that_upstream_itself_reads_is_not_compared(tmp_path, model_type):
    """Its blocks and patches begin at the row's first place, padding or not."""
    path = path_of(write_stand_in(tmp_path, model_type))
    assert path.reason == "" and path.separates_documents
    assert "padded right" in [check.name for check in path.checks]
    assert "padded left" not in [check.name for check in path.checks]
    assert path.left_out["padded left"].startswith("upstream reads the padding itself; ours differs by ")


def test_padding_that_upstream_does_not_read_is_compared(tmp_path):
    path = path_of(write_stand_in(tmp_path, "llama", edits=(LEAKS,)))
    assert any(failure.startswith("padded left: logits differ") for failure in path.failures)


def test_upstreams_own_refusal_of_a_document_is_said_to_be_that(tmp_path):
    path = path_of(write_stand_in(tmp_path, "reformer"))
    assert path.reason.startswith("upstream's own class fails on a document: If training, sequence length 9 has to be")


def test_packed_rows_are_those_of_the_data_pipeline():
    documents = training_inputs.text_documents(training_inputs.TokenSampler(small_config("llama").config))
    packed = documents.packed()
    assert packed["cu_seq_lens_q"].diff().tolist() == list(training_inputs.LENGTHS)
    for row, place in zip(documents.rows, documents.bounds(), strict=True):
        assert torch.equal(packed["input_ids"][:, place], row["input_ids"])


@pytest.mark.parametrize("only", [(), ("plain",)], ids=["packed rows", "unpacked rows of a head"])
def test_a_failure_with_media_names_what_upstreams_own_attentions_differ_by(monkeypatch, only):
    comparison = Comparison.__new__(Comparison)
    comparison.reference, comparison.failures, comparison.check_names = SimpleNamespace(_supports_sdpa=True), [], only
    comparison.text, comparison.needs_media, comparison.positions = SimpleNamespace(packed=dict), True, None
    row = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}
    comparison.media = {"images": training_inputs.Documents((row,), padded=row)}

    def fail(name, *_args, **_kwargs):
        comparison.failures.append(f"{name} differs")

    for check in ("rows", "documents"):
        monkeypatch.setattr(comparison, check, fail)
    monkeypatch.setattr(comparison, "accumulation", lambda _: None)
    for check in ("large_weights", "bf16"):
        monkeypatch.setattr(comparison, check, lambda: None)
    monkeypatch.setattr(comparison, "_sdpa_deviation", lambda rows: 0.4 if rows == [row] else 0.0)
    comparison.plain = row
    comparison.run()
    *without_media, with_media = comparison.failures
    assert without_media and all(failure.endswith("differs") for failure in without_media)
    assert with_media.endswith("upstream's own logits with sdpa differ from its eager ones by 4e-01, relative.")
