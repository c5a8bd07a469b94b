"""After a trial a model has the buffers, attributes, gradients and random states that it had, whatever the trial changed."""

from __future__ import annotations

import torch
from torch import nn

from patchgen.runtime.parallel.restored import restored


class Keeping(nn.Module):
    """A module whose forward changes everything that a forward can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("frequencies", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.longest, self.seen, self.cached, self.factor = 4, [1], {"a": 1}, torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.factor += 1
        self.table.resize_(3)
        self.register_buffer("frequencies", torch.zeros(3))
        self.register_buffer("new", torch.zeros(3))
        self.longest = 8
        self.seen.append(2)
        self.cached |= {"b": 2}
        if not hasattr(self, "first"):
            self.register_forward_hook(lambda *_: None)
        self.first = x.detach().mean()
        return (x * self.weight + torch.rand(2)).sum()


def test_what_a_trial_changes_is_as_before():
    model = Keeping()
    model.weight.grad = gradient = torch.zeros(2)
    factor, frequencies, random = model.factor, model.frequencies, torch.get_rng_state()
    with restored(model):
        model(torch.ones(2)).backward()
        model(torch.ones(2)).backward()
        assert model.weight.grad.tolist() == [2, 2]
    assert model.calls.tolist() == [0, 0]
    assert model.table.tolist() == [1, 1]
    assert model.factor is factor
    assert factor.tolist() == [1, 1]
    assert model.frequencies is frequencies
    assert not hasattr(model, "new")
    assert not hasattr(model, "first")
    assert not model._forward_hooks
    assert (model.longest, model.seen, model.cached) == (4, [1], {"a": 1})
    assert model.weight.grad is gradient
    assert gradient.tolist() == [0, 0]
    assert torch.equal(torch.get_rng_state(), random)
    assert list(model.state_dict()) == ["weight", "calls", "frequencies"]
