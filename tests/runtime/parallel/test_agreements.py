"""What ranks agree on in a step, and what must not reach the next: on one process, its answers in place of all ranks'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_absent_towers import TwoBatches
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from patchgen.kernels.moe import early_gradients
from patchgen.runtime import parallel, sequence_ops
from patchgen.runtime.parallel import ParallelConfig, buffers, collectives, loss, unused

TWO = ParallelConfig.for_world(2)


def test_the_order_of_units_is_that_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second step of the same units has the digest of the first, whatever was before."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    compared = []
    monkeypatch.setattr(unused, "all_reduce", lambda mine, **_: compared.append(int(mine[0])) or mine)
    model, order = nn.Linear(2, 2), unused.UnitOrder()
    setattr(model, unused._ORDERS, (order,))
    for _ in range(2):
        order.note(3, "gather", "layers.3")
        unused.drop_unused_gradients(model)
    assert compared[0] == compared[1] != 0
    assert not order.names


@pytest.mark.parametrize("is_live_first", [False, True])
def test_a_step_that_began_before_its_state_is_live_counts(is_live_first: bool) -> None:
    state = TwoBatches(TWO)
    first, second = parallel.using(state), loss.step(7, 2)
    with first if is_live_first else second, second if is_live_first else first:
        assert (loss.current_step().num_items, loss.current_step().num_micro_batches) == (7, 2)
    assert loss.current_step() == loss.Step()


def test_buffers_that_are_built_draw_nothing_of_the_run() -> None:
    """A constructor that draws its buffer: the buffer is there, and the next random number is the one before."""

    class Drawing(PreTrainedModel):
        config_class = LlamaConfig

        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("drawn", torch.rand(5), persistent=False)

    model = Drawing(LlamaConfig())
    before = torch.get_rng_state()
    built = buffers.constructed_buffers(model)
    assert built["drawn"].shape == (5,) and 0 <= built["drawn"].min() < built["drawn"].max() < 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_branch_that_another_rank_takes_gets_a_mask_of_truth_values(
    is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`x[mask]` selects by a mask of truth values, none here, and by whole numbers the first token as often as there are tokens."""
    monkeypatch.setattr(collectives, "all_reduce", lambda own, **_: own + is_asked)
    hidden_BSH = torch.randn(1, 4, 2)
    with parallel.using(TwoBatches(TWO)):
        mask = sequence_ops.tokens_of_any_rank(None, hidden_BSH)
    assert (mask is not None) is is_asked
    if mask is not None:
        assert mask.dtype == torch.bool and hidden_BSH[mask].shape == (0, 2)


class Defers(torch.autograd.Function):
    """`weight * 2` whose gradient comes late; `ends` is called when its backward is done."""

    @staticmethod
    def forward(ctx, weight, ends):
        ctx.weight, ctx.ends = weight, ends
        return weight.detach() * 2

    @staticmethod
    def backward(ctx, gradient):
        assert early_gradients.defer(ctx.weight, lambda: gradient * 2)
        ctx.ends()
        return None, None


def test_what_a_failed_backward_deferred_is_not_computed_in_the_next() -> None:
    taken = []
    weight = nn.Parameter(torch.ones(2))
    setattr(weight, early_gradients.DEFERRED_GRADIENT_SINK, taken.append)

    def fails() -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        Defers.apply(weight, fails).sum().backward()
    Defers.apply(weight, early_gradients.compute_deferred).sum().backward()
    early_gradients.discard_deferred()
    assert [one.tolist() for one in taken] == [[2.0, 2.0]]


def test_that_a_unit_accumulated_does_not_depend_on_what_this_rank_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two micro-batches: a rank whose rows left out a parameter of the unit sums in the dtype that the other has."""
    monkeypatch.setattr(unused.FSDPParamGroup, "post_backward", lambda *_: None)
    widened = []
    computed = nn.Parameter(torch.ones(2))
    lacks = SimpleNamespace(
        _unsharded_param=computed,
        unsharded_accumulated_grad=None,
        sharded_param=nn.Parameter(torch.ones(1)),
        to_accumulated_grad_if_needed=lambda: widened.append(1),
    )
    group = unused.ZeroFillingGroup.__new__(unused.ZeroFillingGroup)
    group.order, group.number, group.fsdp_params = unused.UnitOrder(), 0, [lacks]
    group.modules, group._module_fqn = (), "layer"
    for is_last in (False, True):
        group._runs, group._took_part, group.reduce_grads = 1, True, is_last
        group.post_backward()
    assert widened == [1] and not group.has_accumulated
    group._runs, group._took_part = 1, True
    group.post_backward()  # of a step of one micro-batch: summed as computed
    assert widened == [1]
