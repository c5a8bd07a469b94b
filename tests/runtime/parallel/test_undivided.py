"""Units that one rank holds alone: FSDP2's numbers to the bit, without its copies; copies that are never old."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from patchgen.runtime.parallel import ParallelConfig, gradients, sharding, undivided
from patchgen.runtime.parallel.state import ParallelState


@pytest.fixture(scope="module")
def state():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ParallelState.create(ParallelConfig(), "cpu")
    dist.destroy_process_group()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Tied ends and two layers, the second called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.layers = nn.ModuleList(Layer(8) for _ in range(2))
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in (*self.layers, self.layers[1]):
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).float().view(-1, 16), ids.view(-1))


def sharded(state, dtype=torch.bfloat16, freeze: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    if freeze is not None:
        model.get_parameter(freeze).requires_grad_(False)
    options = sharding.ShardingOptions(param_dtype=dtype, reduce_dtype=torch.float32)
    return sharding.shard_model(model, state, layer_classes=["Layer"], options=options)


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 16, (2, 6), generator=torch.Generator().manual_seed(seed))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local()


def train(model, steps: int, optimizer=None) -> list[torch.Tensor]:
    """Losses, norms, gradients and parameters of steps of two micro-batches."""
    optimizer = optimizer or torch.optim.AdamW(sharding.optimizer_groups(model), lr=1e-2, foreach=True)
    found = []
    for step in range(steps):
        for micro in range(2):
            sharding.reduce_gradients(model, is_last=micro == 1)
            loss = model(batch(10 * step + micro))
            loss.backward()
            found.append(loss.detach().clone())
        found += [local(p.grad).float() for p in model.parameters() if p.grad is not None]
        found.append(gradients.clip(model, 1.0, optimizer=optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return found + [local(p).clone() for p in model.parameters()]


@pytest.mark.parametrize("freeze", [None, "layers.0.up.weight"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_numbers_are_fsdps_to_the_bit(state, dtype, freeze, monkeypatch):
    found = train(sharded(state, dtype, freeze), steps=3)
    with monkeypatch.context() as patch:
        patch.setattr(undivided, "install", lambda model: 0)
        model = sharded(state, dtype, freeze)
        assert undivided.param_groups(model)[0].__class__ is not undivided.UndividedGroup
        expected = train(model, steps=3)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_is_not_cast_is_not_copied(state):
    model = sharded(state, dtype=None)
    model(batch(0))
    (group,) = undivided.param_groups(model.layers[0])
    for param in group.fsdp_params:
        assert param._unsharded_param.data_ptr() == param._sharded_local_tensor.data_ptr()


def test_a_gradient_is_handed_over_as_it_is_where_its_parameter_takes_it(state):
    model = sharded(state)
    weight = model.layers[0].down.weight
    weight.grad_dtype = None
    model(batch(0)).backward()
    assert local(weight.grad).dtype == torch.bfloat16
    first = local(weight.grad).float()
    model(batch(1)).backward()
    assert local(weight.grad).dtype == torch.float32, "sums are in the dtype of the parameter"
    again = sharded(state)
    again(batch(1)).backward()
    assert torch.equal(local(weight.grad), first + local(again.layers[0].down.weight.grad))


def test_a_unit_with_frozen_parameters_is_left_to_fsdp(state):
    model = sharded(state, freeze="layers.0.up.weight")
    model(batch(0))
    kept = [undivided.param_groups(module)[0].keeps_copies for module in (*model.layers, model)]
    assert kept == [False, True, True]


# ------------------------------------------------------------------------------------------- copies are as new as needed

CHANGES = {
    "in place": lambda model, weight: weight.mul_(2),
    "its local part": lambda model, weight: weight.to_local().mul_(2),
    "a state dict": lambda model, weight: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}),
    "torch's optimizer": lambda model, weight: _step_of_torch(weight, foreach=False),
    "torch's foreach optimizer": lambda model, weight: _step_of_torch(weight, foreach=True),
    "torch's fused optimizer": lambda model, weight: _step_of_torch(weight, fused=True),
    "out of sight, then forgotten": lambda model, weight: _out_of_sight(model, weight),
}


def _step_of_torch(weight: nn.Parameter, **options: bool) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=1.0, **options).step()
    weight.grad = None


def _out_of_sight(model: nn.Module, weight: nn.Parameter) -> None:
    weight.data.to_local().data.mul_(2)
    undivided.forget_copies(model)


def written_copies(model: nn.Module) -> None:
    """As after a step of an optimizer that writes copies."""
    for parameter in model.parameters():
        copy = undivided.copy_of(parameter)
        copy.tensor.copy_(local(parameter).view(-1))
        copy.mark_written(parameter)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_parameter_is_cast_again(state, change):
    model = sharded(state)
    weight = model.layers[0].down.weight
    before = model(batch(0)).detach()
    model.reshard()
    written_copies(model)
    with torch.no_grad():
        CHANGES[change](model, weight)
    found = model(batch(0)).detach()
    model.reshard()
    undivided.forget_copies(model)
    assert torch.equal(found, model(batch(0)).detach())
    assert not torch.equal(found, before)


def test_what_the_optimizer_wrote_is_used_in_training_and_cast_anew_in_evaluation(state):
    model = sharded(state)
    model(batch(0)).backward()
    written_copies(model)
    marked = undivided.copy_of(model.layers[0].down.weight)
    marked.tensor.zero_()
    trained = model(batch(0)).detach()
    model.reshard()
    evaluated = model.eval()(batch(0)).detach()
    model.reshard()
    assert not torch.equal(trained, evaluated)
    undivided.forget_copies(model)
    assert torch.equal(evaluated, model(batch(0)).detach())
