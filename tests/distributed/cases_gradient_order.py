"""When gradients of experts that read each other's memory leave, and when they are computed; see test_expert_parallel.py."""

from __future__ import annotations

import cases_captured
import pytest
import torch
import torch.distributed as dist
from cases_experts import SLOTS, create_peers, routing
from torch import Tensor

from patchgen.kernels.fused_moe import fused_moe as one_process
from patchgen.kernels.moe import early_gradients
from patchgen.runtime import parallel
from patchgen.runtime.parallel import checkpointing, expert_peers, experts, loss, undivided


class _HandsOver(torch.autograd.Function):
    """Stands for experts; its backward hands gradients over, as the Triton experts' does.

    It need not be the derivative of the forward: gradients are only compared with those of the same backward without a hand-over.
    """

    @staticmethod
    def forward(ctx, rows, weights):
        return rows * weights.sum(1, keepdim=True) * 2

    @staticmethod
    def backward(ctx, gradient):
        rows_gradient, weights_gradient = gradient * 2, gradient.sum(1, keepdim=True).expand(-1, SLOTS).contiguous()
        early_gradients.hand_over(rows_gradient, weights_gradient)
        return rows_gradient, weights_gradient


def count_gradient_sends(is_whole_gradient: bool) -> int:
    """How often gradients of tokens start on their way; they are what travels without the hand-over.

    Args:
        is_whole_gradient: what is handed over is the whole gradient; else half of it, for the tokens are used once more.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    state = create_peers(world)
    hidden, index, weights = routing("uneven", rank, 2 * world)
    started: list[int] = []
    start = expert_peers._Exchange.start_gradients

    def run(hands_over: bool) -> list[Tensor]:
        leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]

        def compute(rows: Tensor, _index: Tensor, row_weights: Tensor) -> Tensor:
            out = _HandsOver.apply(rows, row_weights)
            return out if is_whole_gradient else out + _HandsOver.apply(rows, row_weights)

        if not hands_over:
            early_gradients.hand_over, kept = lambda *_: None, early_gradients.hand_over
        try:
            expert_peers.exchange_by_peer_memory(
                state, leaves[0], index, leaves[1], compute, num_experts=2 * world
            ).sum().backward()
        finally:
            if not hands_over:
                early_gradients.hand_over = kept
        return [leaf.grad for leaf in leaves]

    expected = run(hands_over=False)
    expert_peers._Exchange.start_gradients = lambda *args: started.append(1) or start(*args)
    try:
        found = run(hands_over=True)
    finally:
        expert_peers._Exchange.start_gradients = start
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    return len(started)


class _DefersGradients(torch.autograd.Function):
    """Experts whose backward does what the Triton experts' does: it hands over what is awaited, then defers what may wait."""

    @staticmethod
    def forward(ctx, rows, weights, gate_up, down, compute):
        ctx.down = down
        ctx.leaves = [one.detach().requires_grad_() for one in (rows, weights, gate_up, down)]
        with torch.enable_grad():
            ctx.out = compute(*ctx.leaves)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, gradient):
        rows_gradient, weights_gradient, gate_up_gradient, down_gradient = torch.autograd.grad(
            ctx.out, ctx.leaves, gradient
        )
        if early_gradients.is_awaited():
            early_gradients.hand_over(rows_gradient, weights_gradient)
            if early_gradients.defer(ctx.down, lambda: down_gradient):
                return rows_gradient, weights_gradient, gate_up_gradient, None, None
        return rows_gradient, weights_gradient, gate_up_gradient, down_gradient, None


def count_deferred_gradients(checkpointing_mode: str) -> list[int]:
    """How many gradients were still to come when each layer's exchange of gradients began, and when the backward ended.

    Every gradient after two micro-batches has the bits that it has where none is deferred.
    """
    state = create_peers(dist.get_world_size())
    inputs = [cases_captured.row(seed + state.batch_index, (20, 28), state) for seed in (0, 10)]
    waiting: list[int] = []
    original_defer, original_gather, original_kernel = (
        early_gradients.defer,
        expert_peers._Exchange.gather_output_gradients,
        experts.experts_kernel,
    )
    original_add, added = undivided._add_gradient, []

    def deferring_experts(rows, index, weights, gate_up, down, **options):
        def compute(x, w, *projections):
            return one_process(x, index, w, *projections, **options, backend="reference")

        return _DefersGradients.apply(rows, weights, gate_up, down, compute)

    def run() -> dict[str, Tensor]:
        model = cases_captured.model_of(state)
        checkpointing.apply(model, checkpointing_mode)
        for micro_batch in inputs:
            items, tokens = loss.count_items(inputs, "cpu"), loss.count_tokens(inputs, "cpu")
            with parallel.using(state), loss.step(items, 2, num_tokens=tokens):
                model(**micro_batch, num_items_in_batch=items, use_cache=False).loss.backward()
                waiting.append(len(early_gradients._deferred))
        return {name: undivided.local(parameter.grad) for name, parameter in model.named_parameters()}

    try:
        experts.experts_kernel = lambda: deferring_experts
        undivided._add_gradient = lambda *args: added.append(1) or original_add(*args)
        early_gradients.defer = lambda *_: False
        expected = run()
        early_gradients.defer = original_defer
        waiting.clear()
        early_gradients._deferred.append((0, lambda: pytest.fail("left by a backward that failed")))
        additions_without_deferral = len(added)
        expert_peers._Exchange.gather_output_gradients = lambda *args: (
            waiting.append(len(early_gradients._deferred)) or original_gather(*args)
        )
        found = run()
    finally:
        early_gradients.defer, expert_peers._Exchange.gather_output_gradients, experts.experts_kernel = (
            original_defer,
            original_gather,
            original_kernel,
        )
        undivided._add_gradient = original_add
    assert len(added) == 2 * additions_without_deferral > 0, "a deferred gradient is added as often as one that is not"
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0, msg=name)
    return waiting
