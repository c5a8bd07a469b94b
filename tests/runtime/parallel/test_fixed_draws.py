"""Under `fixed_draws` dropout does nothing, what torch draws is constant for every shape, and the generators stay as they were."""

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
def test_dropout_does_nothing_and_draws_are_constant(draw, expected: Tensor):
    before = torch.get_rng_state()
    with fixed_draws():
        actual = draw()
    torch.testing.assert_close(actual, expected)
    assert torch.equal(torch.get_rng_state(), before)


class Noisy(nn.Module):
    """Draws of several kinds, each token for itself but for the attention to those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        noisy = x + torch.randn_like(x) + torch.rand(x.shape) * torch.bernoulli(torch.full_like(x, 0.3))
        attended = F.scaled_dot_product_attention(noisy, noisy, noisy, dropout_p=0.5, is_causal=True)
        return self.dropout(attended) + torch.empty_like(x).normal_()


def test_a_part_of_the_input_draws_what_the_whole_did():
    model = Noisy().train()
    with fixed_draws():
        whole, part = model(X), model(X[:, :, :2])
    torch.testing.assert_close(part, whole[:, :, :2])
    assert not torch.equal(model(X), whole), "outside of the block it draws"


def test_other_samples_stay_random_and_move_the_generator():
    before = torch.get_rng_state()
    with fixed_draws():
        torch.multinomial(torch.ones(4), 2)
    assert not torch.equal(torch.get_rng_state(), before)
