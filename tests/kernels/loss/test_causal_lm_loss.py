"""The chunked language-model loss against transformers' own, value and gradients."""

from __future__ import annotations

import pytest
import torch
from rounding import require_equal_up_to_rounding
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from patchgen.kernels.loss import causal_lm_loss
from patchgen.kernels.loss.causal_lm_loss import chunk_size, chunked_causal_lm_loss, losses_of_rows
from patchgen.kernels.loss.linear_cross_entropy import linear_causal_lm_loss

VOCAB = 67


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(causal_lm_loss, "chunk_size", lambda vocab_size: 8 if vocab_size > 0 else 0)


def heads(dtype: torch.dtype) -> dict:
    linear = nn.Linear(16, VOCAB, bias=False, dtype=dtype)
    biased = nn.Linear(16, VOCAB, dtype=dtype)
    return {
        "linear": (linear, linear),
        "bias": (biased, biased),
        "softcap_and_scale": (linear, lambda hidden: torch.tanh(linear(hidden) * 0.7 / 3.0) * 3.0),
    }


@pytest.mark.parametrize("head_name", ["linear", "bias", "softcap_and_scale"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(17)},
        {"ignore_index": 3},
        {"shift_labels": torch.arange(42).reshape(2, 21) % VOCAB},
        {"cu_seq_lens_q": torch.tensor([0, 21, 42])},
    ],
    ids=["mean", "items", "items_tensor", "ignore_index", "shift_labels", "foreign_keyword"],
)
def test_equals_upstream_in_fp64_like_precision(head_name: str, kwargs: dict):
    torch.manual_seed(0)
    module, head = heads(torch.float32)[head_name]
    hidden = torch.randn(2, 21, 16, requires_grad=True)
    labels = torch.randint(0, VOCAB, (2, 21))
    labels[0, 5:9] = -100
    labels[1, 3] = 3
    if "ignore_index" in kwargs:
        labels[labels == -100] = 3
    inputs = [hidden, *module.parameters()]

    expected = ForCausalLMLoss(head(hidden), labels, VOCAB, **kwargs)
    expected_gradients = torch.autograd.grad(expected, inputs)
    logits, loss = chunked_causal_lm_loss(
        head, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=VOCAB, **kwargs
    )
    gradients = torch.autograd.grad(loss, inputs)

    assert logits is None
    require_equal_up_to_rounding(loss, expected)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        require_equal_up_to_rounding(found, wanted)


def test_without_a_vocabulary_size_the_head_says_how_many_logits_it_has():
    torch.manual_seed(0)
    linear = nn.Linear(16, VOCAB)
    hidden, labels = torch.randn(2, 21, 16), torch.randint(0, VOCAB, (2, 21))
    _, loss = chunked_causal_lm_loss(linear, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=None)
    gradient = torch.autograd.grad(loss, linear.weight)[0]
    expected = ForCausalLMLoss(linear(hidden), labels, VOCAB)
    require_equal_up_to_rounding(loss, expected)
    require_equal_up_to_rounding(gradient, torch.autograd.grad(expected, linear.weight)[0])


def test_no_logits_larger_than_a_chunk_exist():
    seen = []

    def head(hidden):
        seen.append(hidden.shape[1])
        return hidden @ torch.ones(16, VOCAB)

    hidden = torch.randn(2, 21, 16, requires_grad=True)
    labels = torch.randint(0, VOCAB, (2, 21))
    _, loss = chunked_causal_lm_loss(head, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=VOCAB)
    loss.backward()
    assert max(seen) == 8 and sum(seen) >= 2 * 42


def test_a_chunk_in_which_nothing_counts_adds_nothing():
    linear = nn.Linear(16, VOCAB)
    hidden = torch.randn(1, 24, 16)
    labels = torch.full((1, 24), -100)
    labels[0, 20] = 5
    _, loss = chunked_causal_lm_loss(linear, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=VOCAB)
    require_equal_up_to_rounding(loss, ForCausalLMLoss(linear(hidden), labels, VOCAB))


def test_refuses_another_loss_a_wrong_head_and_wrong_labels():
    hidden, labels = torch.randn(1, 8, 16), torch.zeros(1, 8, dtype=torch.long)
    head = nn.Linear(16, VOCAB)
    with pytest.raises(ValueError, match="ForMaskedLMLoss"):
        chunked_causal_lm_loss(head, hidden, labels, loss_function=ForMaskedLMLoss, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="vocab_size 68"):
        chunked_causal_lm_loss(head, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=68)
    with pytest.raises(ValueError, match="7 labels for 8"):
        chunked_causal_lm_loss(head, hidden, labels[:, :7], loss_function=ForCausalLMLoss, vocab_size=VOCAB)


def test_chunk_sizes_are_powers_of_two_within_the_budget():
    for vocab_size in (500, 32_000, 151_936, 262_144):
        size = chunk_size(vocab_size)
        assert size & (size - 1) == 0 and size * vocab_size <= causal_lm_loss.CHUNK_LOGITS


@pytest.mark.parametrize("kernel", [chunked_causal_lm_loss, linear_causal_lm_loss])
def test_the_losses_of_tokens_are_read_and_nothing_else_changes(kernel):
    torch.manual_seed(0)
    head = nn.Linear(16, VOCAB)
    hidden, labels = torch.randn(2, 21, 16, requires_grad=True), torch.randint(0, VOCAB, (2, 21))
    labels[0, 5:9] = -100
    results, read = [], []
    for reader in (None, read.append):
        _, loss = kernel(
            head,
            hidden,
            labels,
            loss_function=ForCausalLMLoss,
            vocab_size=VOCAB,
            num_items_in_batch=9,
            read_losses=reader,
        )
        results.append([loss.detach(), *torch.autograd.grad(loss, [hidden, *head.parameters()])])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    expected = nn.functional.cross_entropy(head(hidden).flatten(0, 1), shifted, reduction="none")
    (losses,) = read
    assert not losses.requires_grad
    require_equal_up_to_rounding(losses, expected.detach())
    require_equal_up_to_rounding(losses_of_rows(head(hidden), shifted.view(2, 21)), expected.detach())
