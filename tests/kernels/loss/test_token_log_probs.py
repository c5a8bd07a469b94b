"""Log-probabilities of tokens in chunks, against the whole logits in fp64: values and gradients."""

from __future__ import annotations

import pytest
import torch
from rounding import require_as_exact
from torch import nn

from patchgen.kernels.loss.chunking import largest_chunk
from patchgen.kernels.loss.token_log_probs import per_token, token_log_probs

TOKENS, HIDDEN, VOCABULARY = 29, 16, 67


def case(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A head with a softcap, hidden states, and targets of which some are none."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64))
        linear.bias.copy_(torch.randn(VOCABULARY, generator=generator, dtype=torch.float64))
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    target = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    target[torch.rand(TOKENS, generator=generator) < 0.3] = -100
    return linear.to(dtype), hidden, target


def whole(linear: nn.Module, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = 5 * torch.tanh(linear(hidden) / 5)
    chosen = logits.log_softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    return chosen.masked_fill(target == -100, 0)


def in_chunks(linear: nn.Module, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with largest_chunk(8):
        return token_log_probs(lambda x: 5 * torch.tanh(linear(x) / 5), hidden, target)


def numbers(function, dtype: torch.dtype) -> list[torch.Tensor]:
    """The log-probabilities, and the gradients of their squares' sum."""
    linear, hidden, target = case(dtype)
    found = function(linear, hidden, target)
    found.square().sum().backward()
    return [found.detach(), hidden.grad, linear.weight.grad, linear.bias.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_are_the_whole(dtype):
    exact = numbers(whole, torch.float64)
    for found, one, other in zip(numbers(in_chunks, dtype), numbers(whole, dtype), exact, strict=True):
        require_as_exact(found, one, other)


def test_no_more_than_a_chunk_of_logits_exists():
    linear, hidden, target = case(torch.float32)
    sizes = []

    def head(chunk: torch.Tensor) -> torch.Tensor:
        sizes.append(chunk.shape[1])
        return linear(chunk)

    with largest_chunk(8):
        found = token_log_probs(head, hidden, target)
        kept = sum(sizes)
        found.sum().backward()
    assert max(sizes) == 8 and sum(sizes) == 2 * kept - 1, (
        "each chunk once forward and once backward, and one token to look"
    )


def test_several_numbers_of_a_token():
    linear, hidden, _ = case(torch.float32)
    with torch.no_grad(), largest_chunk(8):
        values, ids = per_token(linear, hidden, lambda logits: tuple(logits.topk(3)))
        expected = linear(hidden).topk(3)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(values, expected.values)
