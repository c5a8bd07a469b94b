"""Forwards that draw random numbers give the same twice, leave the generators alone, and differ from no dropout in nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.runtime.parallel.fixed_draws import fixed_draws

X = torch.linspace(-1, 1, 24).view(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: nn.Dropout(0.5).train()(X), X),
        (lambda: F.dropout(input=X, p=0.5), X),
        (lambda: torch.dropout(X, 0.5, True), X),
        (lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5), F.scaled_dot_product_attention(X, X, X)),
        (lambda: F.scaled_dot_product_attention(X, X, X, None, 0.5, True), F.scaled_dot_product_attention(X, X, X, is_causal=True)),
        (lambda: torch.rand(2, 3), torch.full((2, 3), 0.5)),
        (lambda: torch.rand(2, requires_grad=True).detach(), torch.full((2,), 0.5)),
        (lambda: torch.randn_like(X), torch.full_like(X, 0.5)),
        (lambda: torch.empty(3).uniform_(1, 2), torch.full((3,), 1.5)),
        (lambda: torch.empty(3).uniform_(to=3.0), torch.full((3,), 1.5)),
        (lambda: torch.empty(3).normal_(1, std=4), torch.full((3,), 3.0)),
        (lambda: torch.bernoulli(torch.full((3,), 0.1)), torch.ones(3)),
        (lambda: X.clone().bernoulli_(0.1), torch.ones_like(X)),
    ],
)  # fmt: skip
def test_what_torch_draws_is_constant(draw, expected: Tensor):
    before = torch.get_rng_state()
    with fixed_draws():
        actual = draw()
    torch.testing.assert_close(actual, expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_others_draw_is_seen_in_the_generators_state():
    before = torch.get_rng_state()
    with fixed_draws():
        torch.multinomial(torch.ones(4), 2)
    assert not torch.equal(torch.get_rng_state(), before)
