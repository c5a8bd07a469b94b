"""What an engine for reinforcement learning asks of a trainer, on a model sharded by `parallel.sharding.shard_model`:

    before = rl.log_probs(model, inputs, state)                                 # of sequences that were generated
    done = rl.update(model, optimizer, [(inputs, advantages)], loss_function, state)    # a step on a loss of them
    engine.load_weights(rl.stream_weights(model))                               # the weights, for what generates

verl and the like bring rollouts, rewards and the loss. Every rank makes each call. The ranks that share a sequence (SP) hand
over the same whole batch, the others batches of their own, equally many. The full logits never exist.

    B rows   S tokens of a row   s of this rank's slice   H hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import PreTrainedModel

from patchgen.kernels.loss.token_log_probs import token_log_probs
from patchgen.runtime import model_calls, parallel
from patchgen.runtime.checkpoint.placement import device_of
from patchgen.runtime.checkpoint.weight_stream import stream_weights
from patchgen.runtime.parallel import gradients, loss, sharding
from patchgen.runtime.parallel.batch import IGNORED, slice_batch
from patchgen.runtime.parallel.collectives import all_gather, all_reduce
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train.feed import to_device
from patchgen.runtime.train.lora import reduce_gradients

__all__ = ["Update", "log_probs", "stream_weights", "update"]

Inputs = Mapping[str, Any]
"""Of the model, whole and on the host: `input_ids` `(B, S)`, `attention_mask` `(B, S)` where rows are padded, `position_ids`
or `cu_seq_lens_q` where they are packed (`parallel/batch.py`)."""


@dataclass(frozen=True)
class Update:
    """What came of a step.

    Attributes:
        loss: the sum of what the loss function returned, over the batches of all ranks.
        grad_norm: of all gradients, before they were clipped.
        taken: False where a gradient was not finite: the weights are as they were.
    """

    loss: float
    grad_norm: float
    taken: bool


@torch.no_grad()
def log_probs(model: PreTrainedModel, inputs: Inputs, state: ParallelState, *, temperature: float = 1.0) -> Tensor:
    """The log-probability of each token after those before it, `(B, S)` in fp32 or wider, on the device of the model.

    0 for the first token of a document and for padding. With the same weights they are those that `update` computes, bit for
    bit, dropout apart.

    Args:
        temperature: that the tokens were drawn with; the logits are divided by it.
    """
    found: list[Tensor] = []

    def keep(values: Tensor) -> Tensor:
        found.append(values)
        return values.new_zeros(())

    was_training = model.training
    model.eval()
    try:
        with parallel.using(state):
            _loss(model, _prepared(inputs, state), state, keep, temperature, router_loss=False)
    finally:
        model.train(was_training)
    assert isinstance(model, FSDPModule), "sharded by `shard_model`"
    model.reshard()  # without a backward, the root stays gathered
    return found[0]


def update(
    model: PreTrainedModel,
    optimizer: Optimizer,
    batches: Sequence[tuple[Inputs, Any]],
    loss_function: Callable[[Tensor, Any], Tensor],
    state: ParallelState,
    *,
    temperature: float = 1.0,
    router_loss: bool = False,
    max_grad_norm: float = 1.0,
    on_nonfinite: Literal["skip", "stop"] = "skip",
) -> Update:
    """One step of the optimizer on a loss of log-probabilities.

    Args:
        batches: of this rank, one backward each: the inputs of the model, and what the loss function is told beside the
            log-probabilities (advantages, those of the policy that drew the tokens, which tokens count).
        loss_function: of the log-probabilities `(B, S)` as `log_probs` returns them, and of that, a scalar: this batch's part
            of the loss. The parts of all batches and ranks are added up, so a mean is divided by the number of all of them.
        router_loss: adds the load-balancing loss of the model's config, a mean over the tokens of the step.
        max_grad_norm, on_nonfinite: as `optim` in a recipe.

    Raises:
        ValueError: no batch.
        NonFiniteGradient: with `on_nonfinite="stop"`.
    """
    if not batches:
        raise ValueError("A step needs a batch on each rank: batches is empty.")
    prepared = [_prepared(inputs, state) for inputs, _ in batches]
    device = _device(model)
    parts: list[Tensor] = []

    def part_of(told: Any, values: Tensor) -> Tensor:
        part = loss_function(values, told)
        parts.append(part.detach().clone())  # to what is returned the model adds the loss of its routers, in place
        return part

    model.train()
    with parallel.using(state):
        step = {"num_micro_batches": len(batches), "router_loss": router_loss}
        if router_loss:
            step["num_tokens"] = loss.count_tokens(prepared, device)
        for index, (own, (_, told)) in enumerate(zip(prepared, batches, strict=True)):
            sharding.reduce_gradients(model, is_last=index == len(batches) - 1)
            _loss(model, own, state, partial(part_of, told), temperature, **step).backward()
        reduce_gradients(model)
        norm = gradients.clip(model, max_norm=max_grad_norm, optimizer=optimizer)
        taken = gradients.accept(model, norm, on_nonfinite=on_nonfinite)
        if taken:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # SP ranks have the same parts.
        total = all_reduce(torch.stack(parts).sum(), operation="add up the loss") / state.sp
    return Update(float(total), float(norm), taken)


def _prepared(inputs: Inputs, state: ParallelState) -> dict[str, Any]:
    """This rank's slice: every token is a target that is none of padding and follows none."""
    labels, mask = inputs["input_ids"], inputs.get("attention_mask")
    if mask is not None:
        follows = F.pad(mask[:, :-1], (1, 0))
        labels = labels.masked_fill((mask == 0) | (follows == 0), IGNORED)
    sliced = slice_batch({**inputs, "labels": labels}, sp=state.sp, sp_rank=state.sp_rank)
    return sliced | {"length": labels.shape[1]}


def _loss(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    state: ParallelState,
    function: Callable[[Tensor], Tensor],
    temperature: float,
    **step: Any,
) -> Tensor:
    """This rank's share of the loss that is `function` of the log-probabilities `(B, S)`."""
    inputs = to_device(inputs, _device(model))
    targets = inputs["shift_labels"]

    def of_hidden(head: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        apart = model_calls.documents_apart()
        hidden = hidden_states if apart is None else apart.packed(hidden_states)
        tempered = head if temperature == 1 else lambda states: head(states) / temperature
        values = token_log_probs(tempered, hidden.flatten(0, 1), targets.flatten()).view(targets.shape)
        return function(F.pad(_whole_rows(values, state)[:, : length - 1], (1, 0)))

    length = inputs.pop("length")
    with loss.step(1, objective=of_hidden, **step):
        return model(**inputs, use_cache=False).loss


def _whole_rows(values: Tensor, state: ParallelState) -> Tensor:
    """`(B, s)` of each SP rank as `(B, s * sp)`. Gradients reach this rank's own slice alone: each rank has the whole loss."""
    if state.sp == 1:
        return values
    s = values.shape[1]
    rows = list(all_gather(values, state.sp_group, dim=1, operation="gather log-probabilities").split(s, dim=1))
    rows[state.sp_rank] = values
    return torch.cat(rows, dim=1)


def _device(model: PreTrainedModel) -> torch.device:
    """Where the model computes; with offloading its shards lie elsewhere."""
    return device_of(model.parameters(), otherwise=model.device)
