"""Checks at start-up that a model computes the same on slices of a sequence as on the full sequence: one small forward.

A layer that mixes tokens by other means than the attention, convolutions, recurrences and scans that `ops` handles
(positions derived from token ids, hand-written attention) runs on a slice without an error, and trains wrongly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from patchgen.runtime import parallel
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.state import ParallelState

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
HALF_PRECISION_TOLERANCE = 5e-2


@torch.no_grad()
def require_sliceable(
    model: nn.Module, state: ParallelState, *, vocab_size: int, tokens_per_rank: int = 11, packed: bool = True
) -> float:
    """Compares logits `(1, S, V)` of random tokens, computed in slices, with those of the full sequence.

    Args:
        model: a causal language model, after `shard_model` and with its weights. Every rank must call this.
        vocab_size: upper bound of the random token ids.
        tokens_per_rank: the length of a slice. A prime: what repeats every few tokens differs on slices of that length.
        packed: also compare a packed batch whose documents end where slices end: there position ids do not restart within
            a slice, so logits are right only if every attention gets the document lengths.

    A model in training mode is compared in that mode as well, unless its logits are random there (dropout).

    Returns:
        The largest relative difference over all ranks; 0 without sequence parallelism.

    Raises:
        ValueError: the logits differ by more than rounding.
    """
    if state.sp == 1:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocab_size, (1, tokens_per_rank * state.sp), generator=generator)
    was_training = model.training
    model.eval()
    worst = _require_equal_logits(model, state, {"input_ids": ids}, "Some layer mixes tokens without attention")
    if packed:
        positions = torch.arange(ids.shape[1])[None] % tokens_per_rank
        batch = {"input_ids": ids, "position_ids": positions}
        suspicion = "(a packed batch) Some layer does not pass cu_seq_lens_q to its attention"
        worst = max(worst, _require_equal_logits(model, state, batch, suspicion))
    if was_training:
        model.train()
        suspicion = "(in training mode) Some layer mixes tokens without attention"
        with _state_restored(model, state.data_mesh.device_type):
            worst = max(worst, _require_equal_logits(model, state, {"input_ids": ids}, suspicion))
    if isinstance(model, FSDPModule):
        # The root stays gathered after a forward without backward; an optimizer created next must see the shards.
        model.reshard()
    return worst


@contextlib.contextmanager
def _state_restored(model: nn.Module, device: str) -> Iterator[None]:
    """Restores buffers and random states after the block: a forward in training mode may count, or drop at random."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
            yield
    finally:
        for name, buffer in model.named_buffers():
            if name in before:
                buffer.copy_(before[name])


def _require_equal_logits(model: nn.Module, state: ParallelState, batch: dict[str, Tensor], suspicion: str) -> float:
    device = state.data_mesh.device_type

    def logits(sp: int, sp_rank: int, using: ParallelState) -> Tensor:
        # On the full sequence this is what upstream computes: without position ids the model uses its own, not ours.
        is_upstreams = sp == 1 and "position_ids" not in batch
        part = batch if is_upstreams else slice_batch(batch, sp=sp, sp_rank=sp_rank)
        inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in part.items()}
        with parallel.using(using):
            return model(**inputs, use_cache=False).logits

    # All ranks of a group compute the full sequence; experts stay sharded.
    config = replace(state.config, dp_shard=state.config.num_shards, sp=1)
    full = logits(1, 0, replace(state, config=config))
    if model.training:
        again = (logits(1, 0, replace(state, config=config)) != full).any().float()
        if all_reduce(again, op=dist.ReduceOp.MAX, operation="compare two forwards in training mode"):
            return 0.0
    sliced = logits(state.sp, state.sp_rank, state)
    expected = full.chunk(state.sp, dim=1)[state.sp_rank]
    difference = (sliced - expected).float().abs().max() / full.float().abs().max().clamp(min=1e-12)
    difference = difference.nan_to_num(nan=float("inf"))  # a MAX reduction may lose a NaN of one rank
    worst = float(all_reduce(difference, op=dist.ReduceOp.MAX, operation="compare slices with the full sequence"))
    tolerance = TOLERANCE.get(sliced.dtype, HALF_PRECISION_TOLERANCE)
    if not worst <= tolerance:
        name = type(model).__name__.removeprefix("FSDP")
        raise ValueError(
            f"{name} computes other logits on slices of a sequence (sp={state.sp}) than on the full sequence: they differ by "
            f"{worst:.1e} of the largest, more than {tolerance:.0e}. {suspicion}, or attends without transformers' attention "
            "interface. To fix: train it with sp=1, or generate it with the pass for its mixer."
        )
    return worst
