"""The trainer side of reinforcement learning, on a model sharded by `parallel.sharding.shard_model`:

    before = rl.log_probs(model, inputs, state)                                 # of generated sequences
    done = rl.update(model, optimizer, [(inputs, advantages)], loss_function, state)    # a step on a loss of them
    engine.reload_weights(weights_iterator=rl.stream_weights(model))            # weights for the generation engine

Experts of an MoE model that were selected in one forward are selected again in another with `record_routing`, `routing=` and
`replay_routing` (`router_replay.py`).

Frameworks such as verl provide rollouts, rewards and the loss. All calls are collective. SP ranks pass the same full batch,
other ranks different batches, equally many. Full logits are never materialised.

    B rows   S tokens of a row   s of this rank's slice   H hidden size
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from patchgen.kernels.loss.token_log_probs import token_log_probs
from patchgen.runtime import model_calls, parallel
from patchgen.runtime.checkpoint.placement import device_of
from patchgen.runtime.checkpoint.weight_stream import stream_weights
from patchgen.runtime.parallel import gradients, loss, sharding
from patchgen.runtime.parallel.batch import IGNORED, slice_batch
from patchgen.runtime.parallel.collectives import all_gather, all_reduce
from patchgen.runtime.parallel.reshard import reshard
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.router_replay import RoutingRecord, record_routing, replay_routing
from patchgen.runtime.train import lora
from patchgen.runtime.train.feed import to_device

__all__ = ["RoutingRecord", "Update", "log_probs", "record_routing", "replay_routing", "stream_weights", "update"]

Inputs = Mapping[str, Any]
"""Model inputs of full sequences, on the host: `input_ids` `(B, S)`, `attention_mask` `(B, S)` for padded rows, `position_ids`
or `cu_seq_lens_q` for packed ones (`parallel/batch.py`). Positions that are not given are those that upstream computes."""


@dataclass(frozen=True)
class Update:
    """The result of a step.

    Attributes:
        loss: the sum of the loss function's values, over the batches of all ranks.
        grad_norm: of all gradients, before clipping.
        taken: False if a gradient was not finite and the weights were not changed.
    """

    loss: float
    grad_norm: float
    taken: bool


@torch.no_grad()
def log_probs(
    model: PreTrainedModel,
    inputs: Inputs,
    state: ParallelState,
    *,
    temperature: float = 1.0,
    routing: RoutingRecord | None = None,
) -> Tensor:
    """The log-probability of each token given those before it, `(B, S)` in fp32 or wider, on the device of the model.

    0 for the first token of a document and for padding. With the same weights and without dropout bit-identical to those in
    `update`.

    Args:
        temperature: the sampling temperature; divides the logits.
        routing: the experts to select; None: routers select.

    Raises:
        ValueError, RuntimeError: the experts of `routing` could not be selected (`replay_routing`).
    """
    results: list[Tensor] = []

    def store(values: Tensor) -> Tensor:
        results.append(values)
        return values.new_zeros(())

    was_training = model.training
    model.eval()
    try:
        with parallel.using(state), _replaying(model, routing, state):
            _loss(model, _local_inputs(model, inputs, state), state, store, temperature, router_loss=False)
    finally:
        model.train(was_training)
        reshard(model)
    return results[0]


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
    routing: Sequence[RoutingRecord | None] | None = None,
) -> Update:
    """One step of the optimizer on a loss of log-probabilities.

    Args:
        batches: of this rank, one backward each: the inputs of the model, and further data for the loss function (advantages,
            log-probabilities of the sampling policy, a token mask).
        loss_function: maps the log-probabilities `(B, S)` as `log_probs` returns them, and that data, to a scalar: this batch's
            part of the loss. Parts are summed over batches and ranks, so a mean must be divided by their total number.
        router_loss: adds the load-balancing loss of the model's config, a mean over the tokens of the step.
        max_grad_norm, on_nonfinite: as `optim` in a recipe.
        routing: for each batch the experts to select, with gradients for their weights; None: routers select.

    Raises:
        ValueError: no batch; another number of records than of batches; a record of other rows (`replay_routing`).
        RuntimeError: the experts of a record could not be selected (`replay_routing`).
        NonFiniteGradient: with `on_nonfinite="stop"`.
    """
    if not batches:
        raise ValueError("A step needs a batch on each rank: batches is empty.")
    records = [None] * len(batches) if routing is None else routing
    if len(records) != len(batches):
        raise ValueError(f"A record of routing is needed for each batch: {len(records)} for {len(batches)} batches.")
    slices = [_local_inputs(model, inputs, state) for inputs, _ in batches]
    device = _device(model)
    parts: list[Tensor] = []

    def compute_part(data: Any, values: Tensor) -> Tensor:
        part = loss_function(values, data)
        parts.append(part.detach().clone())  # a copy: the model adds its router loss to the result in place
        return part

    model.train()
    with parallel.using(state):
        step = {"num_micro_batches": len(batches), "router_loss": router_loss}
        if router_loss:
            step["num_tokens"] = loss.count_tokens(slices, device)
        for index, (local, (_, data), record) in enumerate(zip(slices, batches, records, strict=True)):
            sharding.reduce_gradients(model, is_last=index == len(batches) - 1)
            with _replaying(model, record, state):
                _loss(model, local, state, partial(compute_part, data), temperature, **step).backward()
        lora.reduce_gradients(model)
        norm = gradients.clip(model, max_norm=max_grad_norm, optimizer=optimizer)
        is_taken = gradients.accept(model, norm, on_nonfinite=on_nonfinite)
        if is_taken:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # SP ranks have the same parts.
        total = all_reduce(torch.stack(parts).sum(), operation="add up the loss") / state.sp
    return Update(float(total), float(norm), is_taken)


def _replaying(
    model: PreTrainedModel, record: RoutingRecord | None, state: ParallelState
) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if record is None else replay_routing(model, record, state)


def _local_inputs(model: PreTrainedModel, inputs: Inputs, state: ParallelState) -> dict[str, Any]:
    """This rank's slice; every token is a target unless it is padding or follows padding."""
    labels, mask = inputs["input_ids"], inputs.get("attention_mask")
    if mask is not None:
        follows = F.pad(mask[:, :-1], (1, 0))
        labels = labels.masked_fill((mask == 0) | (follows == 0), IGNORED)
    sliced = slice_batch({**inputs, "labels": labels}, sp=state.sp, sp_rank=state.sp_rank, model=model)
    return sliced | {"length": labels.shape[1]}


def _loss(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    state: ParallelState,
    function: Callable[[Tensor], Tensor],
    temperature: float,
    **step: Any,
) -> Tensor:
    """The loss `function(log_probs)` of this rank's sequences, with log-probabilities `(B, S)`: the same on all ranks of a
    sequence, where each has the gradient of its slice; plus this rank's share of a router loss."""
    model_calls.separate_as_proven(model)
    inputs = to_device(inputs, _device(model))
    targets = inputs["shift_labels"]

    def loss_of_hidden(head: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        apart = model_calls.documents_apart()
        hidden = hidden_states if apart is None else apart.packed(hidden_states)
        tempered = head if temperature == 1 else lambda states: head(states) / temperature
        values = token_log_probs(tempered, hidden.flatten(0, 1), targets.flatten()).view(targets.shape)
        return function(F.pad(_full_rows(values, state)[:, : length - 1], (1, 0)))

    length = inputs.pop("length")
    with loss.step(1, objective=loss_of_hidden, **step):
        return model(**inputs, use_cache=False).loss


def _full_rows(values: Tensor, state: ParallelState) -> Tensor:
    """Gathers `(B, s)` to `(B, s * sp)`. Gradients flow to this rank's slice only, since each rank computes the full loss."""
    if state.sp == 1:
        return values
    s = values.shape[1]
    rows = list(all_gather(values, state.sp_group, dim=1, operation="gather log-probabilities").split(s, dim=1))
    rows[state.sp_rank] = values
    return torch.cat(rows, dim=1)


def _device(model: PreTrainedModel) -> torch.device:
    """The device the model computes on; with offloading its shards are elsewhere."""
    return device_of(model.parameters(), otherwise=model.device)
