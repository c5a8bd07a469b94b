"""Steps that are replayed, on gloo ranks: a recording that runs a step again into the tensors that a graph would write."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig

from patchgen.runtime import attention, parallel, registry
from patchgen.runtime.parallel import ParallelConfig, gradients, loss, sharding
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import captured

TOKENS, VOCABULARY = 48, 61


class RunAgain:
    """In place of a CUDA graph: the captured function, whose results go where they went the first time."""

    def __init__(self, run, model, _state) -> None:
        self.run, self.model = run, model
        run()
        self.first = {one: one.grad for one in model.parameters() if one.grad is not None}

    def replay(self) -> None:
        for parameter in self.first:
            parameter.grad = None
        self.run()
        for parameter, gradient in self.first.items():
            gradient.copy_(parameter.grad)


def model_of(state: ParallelState, frozen: bool = False):
    attention.register()
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    torch.manual_seed(0)
    model = registry.build_model(config, attn_implementation="patchgen_sdpa").train()
    if not frozen:
        return sharding.shard_model(model, state)
    # Through peer memory, where only the units that train keep copies that an optimizer writes.
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    return sharding.shard_model(model, state, options=sharding.ShardingOptions(**dtypes, shard_exchange="peer_memory"))


def row(seed: int, lengths: tuple[int, ...], state: ParallelState) -> dict:
    """A row of documents; what it lacks to `TOKENS` is padding."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (1, TOKENS), generator=draw)
    filler = TOKENS - sum(lengths)
    positions = torch.cat([torch.arange(length) for length in (*lengths, *([filler] if filler else []))])[None]
    whole = {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}
    if filler:
        whole["labels"][:, -filler:] = -100
        whole["real_tokens"] = torch.arange(TOKENS)[None] < TOKENS - filler
    return slice_batch(whole, sp=state.sp, sp_rank=state.sp_rank)


def curve(
    documents: list[list[tuple[int, ...]]], *, replays: bool, frozen: bool = False, **layout
) -> tuple[list[float], int, int]:
    """Loss and norm of each step of SGD, steps replayed, graphs captured.

    Args:
        documents: of each step, the lengths of each batch group's documents.
    """
    state = ParallelState.create(
        ParallelConfig.for_world(dist.get_world_size(), **layout), "cpu", expert_exchange="peer_memory"
    )
    model = model_of(state, frozen)

    def compute(inputs, items, tokens):
        with parallel.using(state), loss.step(items, num_tokens=tokens):
            share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
            share.backward()
        return share.detach()

    recordings: list[RunAgain] = []

    def record(*arguments) -> RunAgain:
        recordings.append(RunAgain(*arguments))
        return recordings[-1]

    step_replayed = captured.CapturedStep(model, state, torch.device("cpu"), compute)
    found: list[float] = []
    for step, groups in enumerate(documents):
        rows = row(10 * step + state.batch_index, groups[state.batch_index % len(groups)], state)
        items, tokens = int(loss.count_items([rows], "cpu")), int(loss.count_tokens([rows], "cpu"))
        if replays:
            with mock.patch.object(captured, "_capture", record):
                share = step_replayed(rows, items, tokens).clone()
        else:
            share = compute(rows, torch.tensor(items), tokens)
        dist.all_reduce(share)
        norm = gradients.clip(model, 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        found += [float(share), float(norm)]
    return found, step_replayed.replayed, len(recordings)
