"""What each rank does in the tests of the router loss; see test_router_loss.py."""

from __future__ import annotations

import cases_models
import cases_sequence
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func as upstream

from patchgen.runtime import ops, parallel
from patchgen.runtime.parallel import batch, loss

ROWS, LENGTH, EXPERTS, LAYERS, TOP_K = 4, 10, 4, 2, 2


def padding() -> Tensor:
    """`(ROWS, LENGTH)` bool: real tokens on either side and in the middle, one row of padding only."""
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    real[0, 7:] = False
    real[1, :4] = False
    real[2, [0, 5, 6]] = False
    real[3] = False
    return real


def expected(logits: Tensor, real: Tensor, scope: str) -> Tensor:
    """Upstream's function on tokens that are not padding; of `(LAYERS, ROWS, LENGTH, EXPERTS)` logits."""
    places = real.nonzero()
    groups = [places] if scope == "global" else [places[places[:, 0] == row] for row in range(ROWS)]
    total = torch.zeros(())
    for group in groups:
        if len(group):
            chosen = tuple(layer[group[:, 0], group[:, 1]] for layer in logits)
            total = total + upstream(chosen, EXPERTS, TOP_K) * len(group) / real.sum()
    return total


def layouts_agree(sp: int, scope: str, micro_batches: int, told_by: str) -> None:
    """Shares of all ranks and micro-batches, and their gradients, against `expected` of the whole batch in one process.

    The last slice of a row is longer than its tokens where sp does not divide it.
    """
    state = cases_sequence.state_of(sp=sp, router_loss=scope)
    function = cases_models.import_generated("qwen3_moe").load_balancing_loss_func
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LAYERS, ROWS, LENGTH, EXPERTS, generator=generator)
    real = padding()
    whole = logits.clone().requires_grad_()
    value = expected(whole, real, scope)
    value.backward()

    mine, slices = [], []
    for rows in torch.arange(ROWS).chunk(micro_batches):
        rows = rows.chunk(state.config.num_batches)[state.batch_index]
        given = {"input_ids": torch.zeros(len(rows), LENGTH, dtype=torch.long), told_by: real[rows]}
        mine.append(batch.slice_batch(given, sp=sp, sp_rank=state.sp_rank))
        padded = torch.nn.functional.pad(logits[:, rows], (0, 0, 0, -LENGTH % sp), value=3.0)
        slices.append(padded.chunk(sp, dim=2)[state.sp_rank].clone().requires_grad_())
    tokens = loss.count_tokens(mine, "cpu")
    assert int(tokens) == int(real.sum())
    share = torch.zeros(())
    for inputs, own in zip(mine, slices, strict=True):
        gate_logits = tuple(layer.flatten(0, 1) for layer in own)
        with parallel.using(state), loss.step(1, micro_batches, num_tokens=tokens if micro_batches > 1 else None):
            part = ops.router_loss(
                function,
                gate_logits,
                EXPERTS,
                TOP_K,
                tokens=inputs["input_ids"],
                real_tokens=inputs.get("real_tokens"),
            )
        part.backward()
        share += part.detach()
    dist.all_reduce(share)
    torch.testing.assert_close(share, value.detach(), rtol=1e-6, atol=0)
    for rows, own in zip(torch.arange(ROWS).chunk(micro_batches), slices, strict=True):
        rows = rows.chunk(state.config.num_batches)[state.batch_index]
        of_rows = torch.nn.functional.pad(whole.grad[:, rows], (0, 0, 0, -LENGTH % sp))
        full = of_rows.chunk(sp, dim=2)[state.sp_rank]
        torch.testing.assert_close(own.grad, full, rtol=1e-5, atol=1e-8)


def refusals() -> list[str]:
    """What is said of a step whose tokens nobody counted, of loads that are not known yet, and of shapes that do not fit."""
    function = cases_models.import_generated("qwen3_moe").load_balancing_loss_func
    logits, tokens = (torch.randn(8, EXPERTS),), torch.zeros(2, 4)

    def refusal(scope: str, real_tokens: Tensor | None = None, tokens: Tensor = tokens, **step: object) -> str:
        state = cases_sequence.state_of(router_loss=scope)
        try:
            with parallel.using(state), loss.step(1, **step):
                ops.router_loss(function, logits, EXPERTS, TOP_K, tokens=tokens, real_tokens=real_tokens)
        except ValueError as error:
            return str(error)
        raise AssertionError("it was computed")

    def direct() -> str:
        try:
            with parallel.using(cases_sequence.state_of()):
                function(logits, EXPERTS, TOP_K)
        except RuntimeError as error:
            return str(error)
        raise AssertionError("it was computed")

    return [
        refusal("row", num_micro_batches=2),
        refusal("global", num_micro_batches=2, num_tokens=8),
        refusal("row", real_tokens=torch.ones(2, 3, dtype=torch.bool)),
        refusal("row", tokens=torch.zeros(2, 3)),
        direct(),
    ]
