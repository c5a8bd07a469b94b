"""Vocabularies that grow: a model whose embeddings and head have more rows than those of its checkpoint.

    rows 0 ... V-1       the checkpoint's, of which each rank reads its own
    rows V ... V'-1      new: the mean of the others, or upstream's initial values

    V rows in the checkpoint   V' rows in the model

The mean is the same, bit for bit, on any number of ranks: values are rounded to multiples of one power of two, whose sums in
64-bit integers have no rounding error and so no order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel

from patchgen.runtime.checkpoint.lazy_tensors import Region
from patchgen.runtime.checkpoint.placement import device_of, local_region, local_tensor

NewRows: TypeAlias = Literal["mean", "random"]
CHUNK_ELEMENTS = 1 << 24
"""Elements that are widened to 64 bits at a time."""


def vocabulary_names(model: PreTrainedModel) -> set[str]:
    """The names, also those of tied ones, of the parameters with one row per token: of the input embeddings and of the head."""
    owners = [input_embeddings(model), model.get_output_embeddings()]
    owned = {id(parameter) for owner in owners if owner is not None for parameter in owner.parameters(recurse=False)}
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in owned}


def input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """The table of the tokens; None: upstream's class says that it has none."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def has_fewer_rows(stored: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a stored shape differs from that of the model in fewer rows alone."""
    return len(stored) == len(shape) > 0 and stored[0] < shape[0] and tuple(stored[1:]) == tuple(shape[1:])


def stored_part(stored: Sequence[int], tensor: Tensor) -> tuple[Region, Tensor]:
    """The region of a stored tensor that this rank reads, and the view of its shard that the region fills.

    Args:
        stored: the shape in the checkpoint: that of `tensor`, or one with fewer rows.
    """
    region, shard = local_region(tensor), local_tensor(tensor)
    if tuple(stored) == tuple(tensor.shape):
        return region, shard
    first, stop = region[0]
    stop = max(first, min(stop, stored[0]))
    return ((first, stop), *region[1:]), shard[: stop - first]


@torch.no_grad()
def fill_new_rows(tensor: Tensor, num_stored: int) -> None:
    """Sets the rows from `num_stored` on to the mean of those before. Collective over the mesh of a DTensor.

    Args:
        tensor [V', ...]: sharded or not, with the first `num_stored` rows filled; of any floating-point dtype.
    """
    shard, (first, stop) = local_tensor(tensor), local_region(tensor)[0]
    num_local = max(0, min(stop, num_stored) - first)
    mean = _mean(tensor, shard[:num_local], num_stored)
    if first + num_local < stop:
        shard[num_local:] = mean.to(shard.device, shard.dtype)


def _mean(tensor: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """The mean of `num_rows` rows, of which this rank holds `rows`, in fp64."""
    device = device_of([tensor], otherwise=rows.device)
    largest = rows.abs().amax().double() if rows.numel() else torch.zeros((), dtype=torch.float64)
    largest = _reduce(tensor, largest.to(device), dist.ReduceOp.MAX, every_dimension=True)
    # |value| < 2^exponent, so that the sum of all rows stays below 2^62.
    exponent = math.frexp(float(largest))[1]
    scale = 2.0 ** (62 - num_rows.bit_length() - exponent)
    total = torch.zeros(rows.shape[1:], dtype=torch.int64, device=rows.device)
    for chunk in rows.split(max(1, CHUNK_ELEMENTS // max(total.numel(), 1))):
        total += (chunk.double() * scale).round().long().sum(0)
    total = _reduce(tensor, total.to(device), dist.ReduceOp.SUM, every_dimension=False)
    return total.double() / num_rows / scale


def _reduce(tensor: Tensor, value: Tensor, operation: dist.ReduceOp.RedOpType, *, every_dimension: bool) -> Tensor:
    """`value` reduced over the ranks that hold other rows of `tensor`, or over all of its mesh."""
    if not isinstance(tensor, DTensor):
        return value
    for dimension, placement in enumerate(tensor.placements):
        divides_rows = isinstance(placement, Shard | _StridedShard) and placement.dim == 0
        if divides_rows or (every_dimension and not isinstance(placement, Replicate)):
            dist.all_reduce(value, op=operation, group=tensor.device_mesh.get_group(dimension))
    return value


def growth_advice(model: PreTrainedModel, stored: Mapping[str, Sequence[int]], new_rows: NewRows | None) -> str:
    """What to do about a checkpoint with a vocabulary of another size than the model's; "" if it has the same.

    Args:
        stored: name in the state dict -> shape in the checkpoint.
        new_rows: what fills new rows; None: nothing, so that there may be none.
    """
    shapes = {
        name: (tuple(stored[name]), tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if name in stored
    }
    size, names = model.config.get_text_config().vocab_size, vocabulary_names(model)
    for name in sorted(names & shapes.keys()):
        before, now = shapes[name]
        if has_fewer_rows(before, now) and new_rows is None:
            return (
                f"{name} has {before[0]} rows in the checkpoint, and the config's vocab_size is {size}. To fix: if the vocabulary "
                "has grown, set model.resize_vocab: {} in the recipe (in Python load_pretrained(..., new_rows='mean')), which "
                f"fills the new rows; otherwise set vocab_size to {before[0]}, in config.json or in model.overrides."
            )
        if has_fewer_rows(now, before):
            return (
                f"{name} has {before[0]} rows in the checkpoint, and the config's vocab_size is {size}: a vocabulary is never "
                f"shrunk. To fix: set vocab_size to {before[0]}, in config.json or in model.overrides."
            )
    others = [name for name, (before, now) in shapes.items() if has_fewer_rows(before, now) and now[0] == size]
    for name in sorted({*others} - names) if new_rows is not None else ():
        return (
            f"{name} has a row per token too, and neither a mean nor random values can fill it: the vocabulary of "
            f"{type(model).__name__} cannot grow. To fix: remove model.resize_vocab, and use a tokenizer of "
            f"{shapes[name][0][0]} tokens."
        )
    return ""
