"""Whether a model computes on slices of a sequence what upstream computes on the whole: one small forward at start-up.

A layer that mixes tokens by other means than attention, a convolution, a recurrence or a scan that `ops` serves
(positions derived from token ids, hand-written attention) runs on a slice without any error, and trains wrongly.
"""

from __future__ import annotations

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
HALF_PRECISION = 5e-2


@torch.no_grad()
def require_sliceable(
    model: nn.Module, state: ParallelState, *, vocab_size: int, tokens_per_rank: int = 8, packed: bool = True
) -> float:
    """Compares logits `(1, S, V)` of random tokens, computed in slices, with those of the whole sequence.

    Args:
        model: a causal language model, after `shard_model` and with its weights. Every rank must call this.
        vocab_size: random token ids lie below it.
        tokens_per_rank: the length of a slice.
        packed: compare a packed batch as well, whose documents meet where slices do: no position id shows it there, so
            it is right only if the lengths of the documents reach every attention.

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
    worst = _require_equal(model, state, {"input_ids": ids}, "Some layer mixes tokens without attention")
    if packed:
        positions = torch.arange(ids.shape[1])[None] % tokens_per_rank
        batch = {"input_ids": ids, "position_ids": positions}
        told = "(a packed batch) Some layer does not hand cu_seq_lens_q to its attention"
        worst = max(worst, _require_equal(model, state, batch, told))
    model.train(was_training)
    if isinstance(model, FSDPModule):
        # The root stays gathered after a forward without backward; an optimizer that is made now must see the shards.
        model.reshard()
    return worst


def _require_equal(model: nn.Module, state: ParallelState, batch: dict[str, Tensor], suspicion: str) -> float:
    device = state.data_mesh.device_type

    def logits(sp: int, sp_rank: int, using: ParallelState) -> Tensor:
        # The whole is what upstream would compute: positions that nobody gave are the model's own, not those that we count.
        is_upstreams = sp == 1 and "position_ids" not in batch
        mine = batch if is_upstreams else slice_batch(batch, sp=sp, sp_rank=sp_rank)
        inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in mine.items()}
        with parallel.using(using):
            return model(**inputs, use_cache=False).logits

    # All ranks of a group compute the whole sequence; experts stay where they are.
    config = replace(state.config, dp_shard=state.config.num_shards, sp=1)
    whole = logits(1, 0, replace(state, config=config))
    own = logits(state.sp, state.sp_rank, state)
    expected = whole.chunk(state.sp, dim=1)[state.sp_rank]
    difference = (own - expected).float().abs().max() / whole.float().abs().max().clamp(min=1e-12)
    difference = difference.nan_to_num(nan=float("inf"))  # a maximum over ranks may lose a NaN of one
    worst = float(all_reduce(difference, op=dist.ReduceOp.MAX, operation="compare slices with the whole sequence"))
    bar = TOLERANCE.get(own.dtype, HALF_PRECISION)
    if not worst <= bar:
        name = type(model).__name__.removeprefix("FSDP")
        raise ValueError(
            f"{name} on slices of a sequence (sp={state.sp}) computes other logits than on the whole: they differ by "
            f"{worst:.1e} of the largest, more than {bar:.0e}. {suspicion}, or attends without transformers' attention "
            "interface. Train it with sp=1, or generate it with the pass that serves its mixer."
        )
    return worst
