"""Streams the weights of a sharded model without files, with the names and layout of an export, to an inference engine.

    for name, tensor in stream_weights(model, dtype=torch.bfloat16):    # on every rank
        ...
    model_runner.reload_weights(weights_iterator=stream_weights(model))     # vLLM takes the iterator

Each rank copies its shards into its segment of a small buffer and broadcasts it; full tensors are assembled from the
buffer one by one:

    buffer   [ of rank 0 | of rank 1 | of rank 2 | of rank 3 ]    a broadcast per rank
                  |____________|___________|___________|
    tensor        experts.5.up_proj [I, H]                        belongs to the caller

No rank ever has the full model: its memory holds its shards, the buffer, the tensor being assembled, and the tensors that
the caller keeps (in a `for` loop, the previous one).

    I expert intermediate size   H hidden size
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from patchgen.runtime.checkpoint.export import holders_of, plan_outputs, saved_tensors
from patchgen.runtime.checkpoint.lazy_tensors import Region, full_region, plan_reads, region_shape
from patchgen.runtime.checkpoint.placement import (
    device_of,
    intersection,
    local_tensor,
    narrow_to,
    rank_and_world_size,
    run_on_all_ranks,
)
from patchgen.runtime.checkpoint.writing import Output
from patchgen.runtime.parallel import watch

BUCKET = 2**30
"""Default of `bucket_bytes`."""
BUFFERS_PER_BUCKET = 8
"""The buffer is one eighth of a bucket, so that it and two of the largest tensors fit into two buckets."""


def stream_weights(
    model: PreTrainedModel,
    *,
    bucket_bytes: int = BUCKET,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The full weights of `model` with the names and layout of an export, on its device, in the same order on every rank.

    Collective: every rank must exhaust the iterator, and must not train the model meanwhile. No communication is pending
    while the caller has a tensor.

    Args:
        model: sharded or not.
        bucket_bytes: the stream and the caller's latest tensor take less than two buckets of memory, if no tensor is larger
            than 7/8 of a bucket; larger ones take more.
        layout, dtype: as in `export_pretrained`.

    Raises:
        CheckpointError: on every rank, at the first tensor: no such layout, adapters in the model, or a weight that `dtype`
            cannot represent.
        ValueError: at the first tensor: `bucket_bytes` is too small.
    """
    if bucket_bytes < 8 * BUFFERS_PER_BUCKET:
        raise ValueError(f"bucket_bytes must be at least {8 * BUFFERS_PER_BUCKET}, not {bucket_bytes}.")
    tensors = saved_tensors(model)
    outputs = run_on_all_ranks(lambda: plan_outputs(model, tensors, layout, dtype), "The weights cannot be streamed:")
    stream = _Stream(tensors, bucket_bytes // BUFFERS_PER_BUCKET)
    for output in outputs:
        if not output.num_bytes:  # nothing to send
            yield output.name, torch.empty(output.tensor.shape, dtype=output.dtype, device=stream.device)
    for output, received in groupby(stream.received_pieces(outputs), key=lambda item: item[0].output):
        yield output.name, _assemble(output, received, stream.device)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of a tensor that one rank sends.

    Attributes:
        output: the tensor that it belongs to.
        read_index: of the read that it is a part of, in the tensor's read plan.
        sender: the rank that sends it.
        source_name: a name in the model's state dict.
        held_region: of the source tensor, held by the sender.
        region: of the source tensor, to send.
    """

    output: Output
    read_index: int
    sender: int
    source_name: str
    held_region: Region
    region: Region

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(region_shape(self.region))

    @property
    def num_bytes(self) -> int:
        return self.size * self.output.dtype.itemsize


class _Stream:
    """Broadcasts the shards of all ranks, a buffer at a time."""

    def __init__(self, tensors: dict[str, Tensor], limit: int) -> None:
        self._rank, self._world = rank_and_world_size()
        self._limit = limit
        self._local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        self._holders = {name: holders_of(tensor, self._world) for name, tensor in tensors.items()}
        self.device = device_of(tensors.values(), otherwise=next(iter(self._local.values())).device)
        # One buffer for all exchanges: gloo's thread may reference what it sent for a moment after the wait.
        self._buffer = torch.empty(limit, dtype=torch.uint8, device=self.device)

    def received_pieces(self, outputs: Iterable[Output]) -> Iterator[tuple[_Piece, Tensor]]:
        """The pieces of all tensors, in order, each with its elements: flat, on the device, valid until the next is taken."""
        waiting: list[_Piece] = []
        size = 0
        for piece in (piece for output in outputs for piece in self._pieces(output)):
            if waiting and size + piece.num_bytes > self._limit:
                yield from self._exchange(waiting)
                waiting, size = [], 0
            waiting.append(piece)
            size += piece.num_bytes
        yield from self._exchange(waiting)

    def _pieces(self, output: Output) -> Iterator[_Piece]:
        """The pieces of a tensor and their senders; the same on every rank."""
        shape = tuple(output.tensor.shape)
        max_elements = self._limit // output.dtype.itemsize
        for read_index, (leaf, region, _) in enumerate(
            plan_reads(output.tensor, full_region(shape), torch.empty(shape, device="meta")).reads
        ):
            for holders, held_region in self._holders[leaf.name]:
                overlap = intersection(region, held_region)
                for part in _split_region(overlap, max_elements) if overlap is not None else ():
                    # Ranks that hold the same region take turns.
                    yield _Piece(output, read_index, holders[read_index % len(holders)], leaf.name, held_region, part)

    def _exchange(self, pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, Tensor]]:
        """Broadcasts pieces from the ranks that hold them. Collective.

        The results are views of the buffer, valid until the next exchange.
        """
        segments: dict[tuple[torch.dtype, int], list[_Piece]] = {}
        for piece in pieces:
            segments.setdefault((piece.output.dtype, piece.sender), []).append(piece)
        parts: dict[_Piece, Tensor] = {}
        requests = []
        start = 0
        # Wider dtypes first, so that each segment is aligned to its dtype.
        for (dtype, sender), sent in sorted(segments.items(), key=lambda entry: -entry[0][0].itemsize):
            sizes = [piece.size for piece in sent]
            stop = start + sum(sizes) * dtype.itemsize
            segment = self._buffer[start:stop].view(dtype)
            start = stop
            parts |= zip(sent, segment.split(sizes), strict=True)
            if sender == self._rank:
                for piece in sent:
                    values = narrow_to(self._local[piece.source_name], piece.held_region, piece.region)
                    parts[piece].view(values.shape).copy_(values)
            if self._world > 1:
                requests.append(dist.broadcast(segment, src=sender, async_op=True))
        with watch.operation("stream weights"):
            for request in requests:
                request.wait()
        return ((piece, parts[piece]) for piece in pieces)


def _split_region(region: Region, max_elements: int) -> Iterator[Region]:
    """A region split into parts of at most `max_elements`."""
    size = math.prod(region_shape(region))
    if size <= max_elements:
        yield region
        return
    dim = next(dim for dim, (start, stop) in enumerate(region) if stop - start > 1)
    start, stop = region[dim]
    step = max(1, (stop - start) * max_elements // size)
    for first in range(start, stop, step):
        yield from _split_region((*region[:dim], (first, min(first + step, stop)), *region[dim + 1 :]), max_elements)


def _assemble(output: Output, received: Iterable[tuple[_Piece, Tensor]], device: torch.device) -> Tensor:
    """The full tensor, from its pieces."""
    shape = tuple(output.tensor.shape)
    tensor = torch.empty(shape, dtype=output.dtype, device=device)
    plan = plan_reads(output.tensor, full_region(shape), tensor)
    for piece, values in received:
        _, region, view = plan.reads[piece.read_index]
        narrow_to(view, region, piece.region).copy_(values.view(region_shape(piece.region)))
    plan.finish()
    return tensor
