"""Heads that write their cross entropy out: equal to upstream's, a share of a step, or refused in one by name."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from generation_cases import applied, edited, load
from torch.nn.functional import cross_entropy, pad

from patchgen import pipeline, provenance
from patchgen.errors import PassMismatch
from patchgen.passes.fused_loss import FusedLoss
from patchgen.runtime import parallel, registry, seams
from patchgen.runtime.parallel import loss
from patchgen.runtime.parallel.config import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify import reference_loss
from patchgen.runtime.verify.small_config import small_config

UPSTREAM = "loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)"
ALIGNED = "loss_fct = nn.CrossEntropyLoss()\n            loss = loss_fct(logits.view(-1, self.config.vocab_size), labels.view(-1))"
KEPT = """if attention_mask is not None:
                kept = attention_mask[..., 1:]
                shift_logits = logits[..., :-1, :][kept.to(logits.device) != 0].contiguous()
                shift_labels = labels[..., 1:][kept.to(labels.device) != 0].contiguous()
            else:
                shift_logits = logits[..., :-1, :].contiguous()
                shift_labels = labels[..., 1:].contiguous()
            loss = nn.CrossEntropyLoss()(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))"""
CAST_BACK = """labels = labels.to(logits.device)
            logits = logits.to(torch.float32)
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss_fct = nn.CrossEntropyLoss()
            loss = loss_fct(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
            logits = logits.to(hidden_states.dtype)
            loss = loss.to(hidden_states.dtype)"""
BY_SIZES = """shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            batch_size, seq_length, vocab_size = shift_logits.shape
            loss_fct = nn.CrossEntropyLoss()
            loss = loss_fct(
                shift_logits.view(batch_size * seq_length, vocab_size), shift_labels.view(batch_size * seq_length)
            )"""
ABOVE = "        outputs: BaseModelOutputWithPast = self.model("
IDS = torch.arange(1, 25).view(2, 12)
LABELS = IDS.masked_fill(IDS % 5 == 0, -100)
MASK = torch.ones_like(IDS).index_fill(1, torch.tensor([10, 11]), 0)
ALL, ITEMS = IDS != IDS, torch.tensor(30)


@pytest.fixture
def state():
    """Of one rank by itself."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield ParallelState.create(ParallelConfig.for_world(1), "cpu")
    dist.destroy_process_group()


def head(tmp_path, *edits):
    generated = pipeline.generate(edited(load("llama"), *edits))
    provenance.write(generated, tmp_path / "llama")
    return registry.read_model(tmp_path / "llama").load().LlamaForCausalLM, generated


def built(tmp_path, *edits):
    kind, _ = head(tmp_path, *edits)
    torch.manual_seed(0)
    return kind(small_config(kind.config_class).config).train()


def gradients(model, value):
    return torch.autograd.grad(value, list(model.parameters()))


def aligned(logits):
    return cross_entropy(logits.view(-1, logits.shape[-1]), LABELS.view(-1))


def kept(logits):
    chosen = MASK[:, 1:] != 0
    return cross_entropy(logits[..., :-1, :][chosen], LABELS[..., 1:][chosen])


def shifted(logits):
    return cross_entropy(logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())


@pytest.mark.parametrize(
    ("written", "mean"), [(ALIGNED, aligned), (KEPT, kept), (CAST_BACK, shifted), (BY_SIZES, shifted)]
)
def test_it_is_upstreams_to_the_bit_and_in_chunks(tmp_path, written, mean):
    model = built(tmp_path, (UPSTREAM, written))
    handed = {"input_ids": IDS, "attention_mask": MASK, "use_cache": False}
    expected = mean(model(**handed).logits)
    found = model(**handed, labels=LABELS)
    assert torch.equal(found.loss, expected)
    for ours, theirs in zip(gradients(model, found.loss), gradients(model, expected), strict=True):
        assert torch.equal(ours, theirs)
    with seams.using(causal_lm_loss="chunked"):
        chunked = model(**handed, labels=LABELS)
    assert chunked.logits is None
    torch.testing.assert_close(chunked.loss, expected)


@pytest.mark.parametrize("kernel", ["eager", "chunked"])
@pytest.mark.parametrize(("written", "mean"), [(ALIGNED, aligned), (KEPT, kept)])
def test_a_call_of_its_own_is_the_mean_over_all_ranks(tmp_path, state, written, mean, kernel):
    model = built(tmp_path, (UPSTREAM, written))
    handed = {"input_ids": IDS, "attention_mask": MASK, "use_cache": False}
    expected = mean(model(**handed).logits)
    with parallel.using(state), seams.using(causal_lm_loss=kernel):
        torch.testing.assert_close(model(**handed, labels=LABELS).loss, expected)


@pytest.mark.parametrize("kernel", ["eager", "chunked"])
@pytest.mark.parametrize("written", [ALIGNED, KEPT])
def test_a_step_says_which_labels_count(tmp_path, state, written, kernel):
    """The targets of the step are those of the data: the next token, and none behind the end of a document."""
    model = built(tmp_path, (UPSTREAM, written))
    targets = pad(LABELS, (0, 1), value=-100)[:, 1:].clone()
    targets[:, 4] = -100
    logits = model(IDS, use_cache=False).logits
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / ITEMS
    with parallel.using(state), loss.step(ITEMS, 2), seams.using(causal_lm_loss=kernel):
        found = model(IDS, labels=LABELS, shift_labels=targets, num_items_in_batch=ITEMS, use_cache=False).loss
    torch.testing.assert_close(found, expected)


def test_labels_that_the_decoder_reads_are_its_targets(tmp_path, state):
    """They are not the next tokens of a step: their number there would be another."""
    made = f"        input_ids = shifted(labels) if labels is not None else input_ids\n{ABOVE}"
    function = (
        "@auto_docstring\nclass LlamaForCausalLM",
        "def shifted(ids):\n    return ids.clamp(min=0).roll(1)\n\n\n@auto_docstring\nclass LlamaForCausalLM",
    )
    kind, generated = head(tmp_path, (UPSTREAM, ALIGNED), (ABOVE, made), function)
    assert "shift_labels=labels" in generated.text and not hasattr(kind, "loss_form")
    torch.manual_seed(0)
    model = kind(small_config(kind.config_class).config).train()
    expected = aligned(model(LABELS.clamp(min=0).roll(1), use_cache=False).logits)
    assert torch.equal(model(labels=LABELS, use_cache=False).loss, expected)
    with parallel.using(state):
        torch.testing.assert_close(model(labels=LABELS, use_cache=False).loss, expected)
        with loss.step(ITEMS, 1), pytest.raises(ValueError, match="targets of its decoder"):
            model(labels=LABELS, use_cache=False, shift_labels=LABELS, num_items_in_batch=ITEMS)


@pytest.mark.parametrize(
    "written",
    [
        ALIGNED.replace("Loss()", "Loss(label_smoothing=0.1)"),
        ALIGNED.replace("labels.view(-1))", "labels.view(-1)) + 0.1 * logits.std()"),
        ALIGNED.replace("labels.view(-1))", "labels.roll(1).view(-1))"),
        BY_SIZES.replace("labels[..., 1:]", "labels[..., :-1]"),
    ],
)
def test_another_loss_is_left_alone_named_and_refused_in_a_step(tmp_path, state, written):
    kind, generated = head(tmp_path, (UPSTREAM, written))
    assert kind.own_loss[0].count("CrossEntropyLoss") == kind.own_loss[0].count("labels") == 1, (
        "the loss, not a part of it"
    )
    (note,) = next(step.outcome.notes for step in generated.steps if step.name == "fused_loss")
    assert note.startswith(f"LlamaForCausalLM: {kind.own_loss[0]} is the loss") and "added" not in note
    assert "expected `loss = self.loss_function(...)` under `if labels is not None:`, found " in note, (
        "why it has no seam"
    )
    assert loss.why_not_additive(kind).startswith("LlamaForCausalLM computes a loss of its own, ")
    torch.manual_seed(0)
    model = kind(small_config(kind.config_class).config).train()
    assert model(IDS, labels=LABELS, use_cache=False).loss.isfinite()
    with parallel.using(state):
        model(IDS, use_cache=False)
        with pytest.raises(ValueError, match="computes a loss of its own"):
            model(IDS, labels=LABELS, use_cache=False)


HANDED_ON = """
class InnerForCausalLM(ExamplePreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids, labels=None, **kwargs):
        hidden_states = self.model(input_ids)
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class OuterForConditionalGeneration(ExamplePreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.text_model = InnerForCausalLM(config)

    def forward(self, input_ids, labels=None, **kwargs):
        outputs = self.text_model(input_ids, labels=labels, **kwargs)
        return CausalLMOutputWithPast(loss=outputs.loss, logits=outputs.logits)
"""
IMPORTED = "from transformers.modeling_outputs import CausalLMOutputWithPast\n"


def test_a_loss_that_is_handed_on_is_the_inner_heads():
    outcome = applied(FusedLoss(), IMPORTED + HANDED_ON)
    assert [hit.site for hit in outcome.hits] == ["InnerForCausalLM.forward"]
    assert [(hit.site, hit.what) for hit in outcome.upstream] == [
        ("OuterForConditionalGeneration.forward", "the loss of InnerForCausalLM")
    ]


@pytest.mark.parametrize(
    "change",
    [
        ("labels=labels, **kwargs)\n        return", "labels=labels)\n        return"),  # a step would not be heard of
        ("loss=outputs.loss,", "loss=outputs.loss * 2,"),
        ("labels=labels, **kwargs)\n        return", "labels=labels.roll(1), **kwargs)\n        return"),
    ],
)
def test_a_loss_that_is_changed_on_its_way_is_no_inner_heads(change):
    assert change[0] in HANDED_ON
    with pytest.raises(PassMismatch, match=r"site +OuterForConditionalGeneration"):
        applied(FusedLoss(), IMPORTED + HANDED_ON.replace(*change))


@pytest.mark.parametrize(
    ("more", "is_told"), [("**kwargs", True), ("cu_seq_lens_q=None", True), ("lengths=None", False)]
)
def test_a_head_that_nothing_tells_where_documents_end_says_so(more, is_told):
    inner = HANDED_ON.partition("class Outer")[0].replace("vocab_size, **kwargs)", "vocab_size)")
    outcome = applied(FusedLoss(), IMPORTED + inner.replace("labels=None, **kwargs)", f"labels=None, {more})"))
    assert len(outcome.hits) == 1
    assert [note.partition(" ")[0] for note in outcome.notes] == ["InnerForCausalLM.forward"] * (not is_told)


GIVEN = HANDED_ON.replace(
    "return CausalLMOutputWithPast(loss=outputs.loss, logits=outputs.logits)",
    """logits = outputs.logits
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)""",
).replace("self.text_model(input_ids, labels=labels,", "self.text_model(input_ids,")


def test_logits_that_another_model_made_have_the_seam():
    outcome = applied(FusedLoss(), IMPORTED + GIVEN)
    assert [hit.site.partition(".")[0] for hit in outcome.hits] == [
        "InnerForCausalLM",
        "OuterForConditionalGeneration",
    ]
    text = outcome.module.block("OuterForConditionalGeneration").text
    assert "logits, loss = ops.causal_lm_loss(\n            ops.given_logits,\n            outputs.logits,\n" in text


def test_logits_that_only_look_like_a_models_have_none():
    with pytest.raises(PassMismatch, match=r"<projection>"):
        applied(
            FusedLoss(),
            IMPORTED + GIVEN.replace("outputs = self.text_model(input_ids, ", "outputs = made(input_ids, "),
        )


COLUMNS = "logits = self.lm_head(hidden_states)\n        "


@pytest.mark.parametrize(
    "code",
    [
        "columns = self.model.columns\n        logits[:, :, columns] = torch.finfo(logits.dtype).min",
        "logits = torch.cat((logits, logits), -1)",
        "logits = logits[..., : part.size]",
    ],
)
def test_what_a_head_makes_of_its_logits_goes_along(code):
    inner = IMPORTED + HANDED_ON.partition("class Outer")[0]
    above = "part = self.config.text\n        hidden_states = self.model(input_ids)"
    text = inner.replace(COLUMNS.rstrip(), COLUMNS + code).replace("hidden_states = self.model(input_ids)", above)
    assert len(applied(FusedLoss(), text).hits) == 1


PROJECTED = "logits = self.lm_head(hidden_states)\n"


def test_logits_of_two_branches_have_the_seam():
    branches = f"if self.config.doubled:\n            {PROJECTED}        else:\n            {PROJECTED[:-1]} * 2\n"
    text = applied(
        FusedLoss(), IMPORTED + HANDED_ON.partition("class Outer")[0].replace(PROJECTED, branches)
    ).module.text
    assert (
        f"        def head(hidden_states):\n            if self.config.doubled:\n                {PROJECTED}" in text
    )
    assert "ops.causal_lm_loss(\n            head,\n            hidden_states,\n" in text


SWITCHED = (
    UPSTREAM
    + """
            if self.weight > 0:
                spread = logits.logsumexp(dim=-1).pow(2).mean()
                loss = loss + self.weight * spread"""
)
HELD = "        self.vocab_size = config.vocab_size\n        self.lm_head"


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_term_of_all_logits_is_upstreams_and_no_step_has_it(tmp_path, state, weight):
    held = (HELD, f"        self.weight = {weight}\n{HELD}")
    model = built(tmp_path, (UPSTREAM, SWITCHED), held)
    logits = model(IDS, use_cache=False).logits
    mean = cross_entropy(logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())
    with seams.using(causal_lm_loss="chunked"):
        found = model(IDS, labels=LABELS, use_cache=False)
    torch.testing.assert_close(found.loss, mean + weight * logits.logsumexp(-1).pow(2).mean())
    assert (found.logits is None) == (weight == 0.0)
    with parallel.using(state), pytest.raises(ValueError, match="weight > 0") if weight else contextlib.nullcontext():
        torch.testing.assert_close(model(IDS, labels=LABELS, use_cache=False).loss, mean)


@pytest.mark.parametrize("switch", ["self.lm_head.weight.std() > 0", "logits.std() > 0", "self.training"])
def test_a_term_that_no_number_switches_is_refused(switch):
    with pytest.raises(PassMismatch, match="with the loss alone in it"):
        pipeline.generate(edited(load("llama"), (UPSTREAM, SWITCHED.replace("self.weight > 0", switch))))


@pytest.mark.parametrize("written", [ALIGNED, KEPT])
def test_the_reference_of_ranks_weighs_the_mean_of_each_batch_by_its_labels(tmp_path, state, written):
    """Upstream's head hears nothing of a step, and where labels are aligned takes those of the next token."""
    model = built(tmp_path, (UPSTREAM, written))
    batches = [{"input_ids": IDS, "labels": LABELS}, {"input_ids": IDS[:1, :5], "labels": LABELS[:1, :5]}]
    expected, known = reference_loss.loss_and_gradients(model, batches, generated_class=type(model))
    model.zero_grad()
    items = sum((one["labels"][:, 1:] != -100).sum() for one in batches)
    with parallel.using(state), loss.step(items, len(batches)):
        found = sum(
            model(**one, shift_labels=pad(one["labels"], (0, 1), value=-100)[:, 1:], use_cache=False).loss
            for one in batches
        )
    found.backward()
    torch.testing.assert_close(float(found.detach()), expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, known[name])
