"""The optimizer in one pass on one rank: torch's steps on FSDP2's own units, clipping included; copies it leaves behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("triton")

from patchgen.runtime.parallel import ParallelConfig, gradients, sharding, undivided
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import optimizers
from patchgen.runtime.train.adamw import AdamW
from patchgen.runtime.train.optimizers import CombinedOptimizer

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(scope="module")
def state():
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ParallelState.create(ParallelConfig(), DEVICE)
    dist.destroy_process_group()


def sharded(state) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 4)).to(DEVICE)
    options = sharding.ShardingOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharding.shard_model(model, state, layer_classes=["Sequential"], options=options)


def steps(model, optimizer, count: int = 3) -> list[torch.Tensor]:
    norms = []
    for step in range(count):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        model(x).float().square().sum().backward()
        norms.append(gradients.clip(model, 0.5, optimizer=optimizer))
        optimizer.step()
        optimizer.zero_grad()
        if not ON_GPU:
            undivided.forget_copies(model)  # Triton's interpreter rounds to bf16 in its own way
    return norms


def values(model) -> list[torch.Tensor]:
    return [parameter.detach().to_local().clone() for parameter in model.parameters()]


def test_steps_and_state_are_torchs(state, monkeypatch):
    model = sharded(state)
    optimizer = AdamW(sharding.optimizer_groups(model), lr=1e-2)
    with monkeypatch.context() as patch:  # torch's optimizer on units as FSDP2 has them
        patch.setattr(undivided, "install", lambda model: 0)
        other = sharded(state)
    theirs = torch.optim.AdamW(sharding.optimizer_groups(other), lr=1e-2, foreach=True)
    for found, expected in zip(steps(model, optimizer), steps(other, theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    for found, expected in zip(values(model), values(other), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)  # of 3 steps of 1e-2: bf16 gradients may part
    names = {tuple(sorted(fields)) for fields in optimizer.state.values()}
    assert names == {("exp_avg", "exp_avg_sq", "step")} == {tuple(sorted(fields)) for fields in theirs.state.values()}
    theirs.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    steps(model, optimizer, 1)


def test_copies_are_as_new_as_parameters_after_a_step(state):
    model = sharded(state)
    optimizer = AdamW(sharding.optimizer_groups(model), lr=1e-2)
    model(torch.randn(5, 8).to(DEVICE)).float().square().sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        copy = undivided.copy_of(parameter)
        assert copy.is_current(parameter)
        wanted = parameter.detach().to_local().view(-1)
        if ON_GPU:
            assert torch.equal(copy.tensor, wanted.bfloat16())
        torch.testing.assert_close(copy.tensor.float(), wanted, rtol=2**-7, atol=1e-30)


def test_gradients_are_scaled_in_passing_or_in_place_by_their_optimizer(state):
    model = sharded(state)
    first, *rest = model.parameters()
    parts = [torch.optim.SGD([first], lr=0.1), AdamW(rest, lr=1e-2)]
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    model(x).float().square().sum().backward()
    before = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    assert [gradient.dtype for gradient in before] == [torch.float32, *[torch.bfloat16] * len(rest)]
    norm = gradients.clip(model, 0.5, optimizer=CombinedOptimizer(parts))
    factor = 0.5 / (norm + 1e-6)
    assert torch.equal(first.grad.to_local(), before[0] * factor)
    assert torch.equal(parts[1].gradient_factor, factor)
    assert all(torch.equal(p.grad.to_local(), kept) for p, kept in zip(rest, before[1:], strict=True))


def test_narrow_gradients_are_not_scaled_in_place(state):
    model = sharded(state)
    AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(5, 8).to(DEVICE)).float().square().sum().backward()
    with pytest.raises(
        ValueError, match=r"4 gradients are torch.bfloat16 .* clip\(model, max_norm, optimizer=optimizer\)"
    ):
        gradients.clip(model, 0.5)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch"])
def test_a_step_that_the_device_skips_leaves_no_trace(ours):
    """The host launches it like any other, and learns of it before the next: the steps after it have the same bits."""
    if not ours and ON_GPU:
        pytest.skip("torch's is for CPUs")

    def run(gradients_of_steps: list[float]) -> list[torch.Tensor]:
        parameter = nn.Parameter(torch.linspace(-1, 1, 12, device=DEVICE))
        make = AdamW if ours else lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=True)
        optimizer = make([{"params": [parameter]}], lr=1e-2)
        assert optimizers.can_skip(optimizer, parameter.device)
        for gradient in gradients_of_steps:
            parameter.grad = torch.full_like(parameter, gradient)
            norm = gradients.clip(nn.ParameterList([parameter]), 1.0, optimizer=optimizer)
            optimizers.take_where(optimizer, torch.isfinite(norm))
            optimizer.step()
            if not torch.isfinite(norm):
                optimizers.take_back(optimizer)
        state = optimizer.state[parameter]
        return [parameter.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]]

    for one, other in zip(run([0.3, float("nan"), 2.0, float("inf"), -1.0]), run([0.3, 2.0, -1.0]), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_that_has_to_know_is_not_left_to_the_device():
    parameter = nn.Parameter(torch.zeros(4, 4, device=DEVICE))
    muon = torch.optim.Muon([parameter])
    assert not optimizers.can_skip(muon, parameter.device)
    assert not optimizers.can_skip(torch.optim.AdamW([parameter]), parameter.device), "torch's unfused one"
    assert not optimizers.can_skip(AdamW([parameter]), torch.device("meta")), "a norm on another device"
