"""Experts' weights that stay in FP8 within a step: the bits of weights that are quantised each time, and never old ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from interpreted_fp8 import patch
from moe_cases import Case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patchgen.kernels.fused_moe import fused_moe
from patchgen.kernels.moe import fp8_kept, fp8_values
from patchgen.runtime.parallel import ParallelConfig, sharding, undivided
from patchgen.runtime.parallel.state import ParallelState

on_gpu = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
CASE = Case("kept", num_tokens=6, num_experts=2, hidden_size=48, intermediate_size=16)


@pytest.fixture(autouse=True)
def _conversions(monkeypatch):
    if not on_gpu:
        patch(monkeypatch)


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """What is quantised, or transposed, from here on."""
    found: list[str] = []

    def noted(name: str, function: Callable, *arguments: Tensor) -> Tensor:
        found.append(name)
        return function(*arguments)

    for name in ("quantise_weight", "quantise_transposed", "transpose_quantised"):
        monkeypatch.setattr(fp8_kept, name, partial(noted, name, getattr(fp8_kept, name)))
    return found


def gradients(leaves: dict[str, Tensor], recomputed: bool = False) -> list[Tensor]:
    """Output and gradients of one call, as a micro-batch computes them."""

    def layer(hidden_states: Tensor) -> Tensor:
        return fused_moe(**(leaves | {"hidden_states": hidden_states}), **CASE.options(), backend="fp8")

    x = leaves["hidden_states"]
    out = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
    trained = [one for one in leaves.values() if one.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), trained)]


def prepared() -> dict[str, Tensor]:
    tensors = CASE.tensors(DTYPE, DEVICE)
    return {name: one.clone().requires_grad_(one.is_floating_point()) for name, one in tensors.items()}


def keep(leaves: dict[str, Tensor], *, transposed: bool = True) -> list[fp8_kept.KeptForms]:
    return [fp8_kept.keep(leaves[name].detach(), transposed=transposed) for name in ("gate_up_proj", "down_proj")]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("recomputed", [False, True])
def test_micro_batches_share_what_is_kept_and_have_the_same_bits(made, recomputed):
    leaves = prepared()
    expected = gradients(leaves, recomputed)
    assert made.count("quantise_weight") == (4 if recomputed else 2) and made.count("quantise_transposed") == 2
    kept = keep(leaves)
    made.clear()
    for _ in range(3):
        assert equal(gradients(leaves, recomputed), expected)
    assert sorted(made) == ["quantise_weight"] * 2 + ["transpose_quantised"] * 2
    del kept
    made.clear()
    gradients(leaves)
    assert made.count("quantise_weight") == 2  # whose owner is gone


def test_without_the_transposed_form_each_backward_makes_it_from_the_kept_rows(made):
    leaves = prepared()
    expected = gradients(leaves)
    _kept = keep(leaves, transposed=False)
    made.clear()
    for _ in range(2):
        assert equal(gradients(leaves), expected)
    assert sorted(made) == ["quantise_weight"] * 2 + ["transpose_quantised"] * 4


def test_a_weight_that_was_written_is_quantised_again():
    """By torch, which increments its version, or by a kernel that does not and says so."""
    leaves = prepared()
    kept = keep(leaves)
    before = gradients(leaves)
    with torch.no_grad():
        leaves["gate_up_proj"].neg_()
    changed = gradients(leaves)
    assert not equal(changed, before)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(leaves["down_proj"]):
        for forms in kept:
            forms.forget()
        leaves["down_proj"].neg_()
    found = gradients(leaves)
    kept.clear()
    assert not equal(found, changed) and equal(found, gradients(leaves))


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="needs a CUDA device")
@pytest.mark.parametrize("by_optimizer", [False, True])
def test_a_replayed_graph_reads_the_weight_that_it_finds(made, by_optimizer):
    leaves = prepared()
    names, kept = ("gate_up_proj", "down_proj"), keep(leaves)

    def step(factor: float) -> None:
        for name, forms in zip(names, kept, strict=True):
            forms.forget()
            rows = forms.to_write(leaves[name].shape) if by_optimizer else None
            with torch.no_grad():
                leaves[name].mul_(factor)
                if rows is not None:
                    for place, new in zip(rows, fp8_values.quantise_weight(leaves[name]), strict=True):
                        place.copy_(new)
            forms.mark_written()

    gradients(leaves)
    step(-1)
    made.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(leaves)
    assert made.count("quantise_weight") == (0 if by_optimizer else 2)
    step(-3)
    graph.replay()
    kept.clear()
    assert equal(captured, gradients(leaves))


@pytest.fixture(scope="module")
def state():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ParallelState.create(ParallelConfig(), "cpu")
    dist.destroy_process_group()


class Stacked(nn.Module):
    """A layer with a weight of experts, of which it notes how it would be read in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 16))
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        rows = fp8_kept.rows_of(self.weight)
        self.seen.append((rows.values.float() * rows.scales[..., None], self.weight.detach().float().clone()))
        return x + torch.einsum("bi,eji->bj", x, self.weight).repeat(1, 4)


class StackedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Stacked()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x).float().square().mean()


@pytest.mark.skipif(on_gpu, reason="in Triton's interpreter")
def test_a_unit_of_one_rank_keeps_fp8_for_a_step_whoever_writes_its_copy(state, made):
    """An optimizer that does, one that does not, and a forward in evaluation."""
    torch.manual_seed(0)
    model = StackedModel()
    options = sharding.ShardingOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharding.shard_model(model, state, layer_classes=["Stacked"], options=options)
    assert undivided.keep_fp8(model, transposed=True) == 1
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    writing = WritingAdamW(sharding.optimizer_groups(model))
    plain = torch.optim.SGD(sharding.optimizer_groups(model), lr=0.3)
    is_written = False  # else each forward casts the parameter, and what it writes is quantised
    for optimizer, steps in ((writing, 2), (plain, 2), (writing, 2)):
        for _ in range(steps):
            made.clear()
            for micro in range(3):
                sharding.reduce_gradients(model, is_last=micro == 2)
                model(x).backward()
            assert len(made) == (0 if is_written else 3)
            optimizer.step()
            optimizer.zero_grad()
            is_written = optimizer is writing
    with torch.no_grad():
        model.eval()(x)
        parameter = next(model.parameters())
        parameter.data.mul_(3)  # increments no version; evaluation casts nonetheless
        model(x)
    layer = model.layers[0]
    for found, weight in layer.seen:
        assert (found - weight).abs().max() <= 2.0**-4 * weight.abs().max()
    weights = torch.stack([weight for _, weight in layer.seen])
    assert len(weights.unique(dim=0)) == 8  # one per step, two in evaluation
    sharding.reduce_gradients(model, is_last=True)


class WritingAdamW(torch.optim.SGD):
    """Writes the compute copy in its step, as `train/adamw.py` does on GPUs."""

    writes_copies = True

    def __init__(self, params) -> None:
        super().__init__(params, lr=0.3)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                values, copy = undivided.local(parameter), undivided.copy_of(parameter)
                assert copy is not None
                copy.before_writing()
                rows = copy.forms.to_write(values.shape)
                values.sub_(0.3 * undivided.local(parameter.grad))
                with torch.autograd._unsafe_preserve_version_counter(copy.tensor):  # as a kernel would
                    copy.tensor.copy_(values.view(-1))
                for place, new in zip(rows, fp8_values.quantise_weight(copy.tensor.view(values.shape)), strict=True):
                    place.copy_(new)
                copy.mark_written(parameter)
