"""Weights out of a sharded model without a file: names and tensors as the export has them, for an engine that generates.

    for name, tensor in stream_weights(model, dtype=torch.bfloat16):    # on every rank
        ...
    vllm_model.load_weights(stream_weights(model))                      # vLLM takes it as it is

Each rank puts what it holds into its segment of a small buffer and sends it to all others; of what has arrived, whole
tensors are put together one by one:

    buffer   [ of rank 0 | of rank 1 | of rank 2 | of rank 3 ]    a broadcast per rank
                  |____________|___________|___________|
    tensor        experts.5.up_proj [I, H]                        belongs to the caller

No rank ever has the model: beside its shards there are the buffer, the tensor that is put together, and what the caller
keeps, which in a loop is the tensor before.
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

from patchgen.runtime.checkpoint.export import device_of, holders_of, planned_outputs, saved_tensors
from patchgen.runtime.checkpoint.load import finish
from patchgen.runtime.checkpoint.placement import intersection, local_tensor, together, within, world
from patchgen.runtime.checkpoint.tensor_sources import Box, box_shape, pull, whole
from patchgen.runtime.checkpoint.writing import Output
from patchgen.runtime.parallel import watch

BUCKET = 2**30
BUFFERS_PER_BUCKET = 8
"""A bucket is room for the largest tensor. What travels at a time is much less, so that buffer and two tensors fit in two."""


def stream_weights(
    model: PreTrainedModel,
    *,
    bucket_bytes: int = BUCKET,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The weights of `model` in upstream's names and layout, whole, on its device, in the same order on every rank.

    Every rank must take all of them; while the caller has one, no rank waits for another. The model must not be trained
    meanwhile.

    Args:
        model: sharded or not.
        bucket_bytes: the stream and the tensor that the caller took last stay below two buckets of memory, if no tensor is
            larger than 7/8 of a bucket; a larger one is streamed, too.
        layout, dtype: as in `export_pretrained`: experts one by one or stacked, and the dtype of floating-point weights.

    Raises:
        CheckpointError: on every rank, before anything travels: no such layout.
        ValueError: a bucket without room for a number.
    """
    if bucket_bytes < 8 * BUFFERS_PER_BUCKET:
        raise ValueError(f"bucket_bytes must be at least {8 * BUFFERS_PER_BUCKET}, not {bucket_bytes}.")
    tensors = saved_tensors(model)
    outputs = together(lambda: planned_outputs(model, tensors, layout, dtype), "The weights cannot be streamed:")
    stream = _Stream(tensors, bucket_bytes // BUFFERS_PER_BUCKET)
    for output in outputs:
        if not output.num_bytes:  # nothing of it travels
            yield output.name, torch.empty(output.moved.shape, dtype=output.dtype, device=stream.device)
    for output, arriving in groupby(stream.arrivals(outputs), key=lambda arrival: arrival[0].output):
        yield output.name, _put_together(output, arriving, stream.device)


@dataclass(frozen=True, eq=False)
class _Piece:
    """What one rank sends of one tensor.

    Attributes:
        output: the tensor that it is for.
        read: which of the reads of that tensor it fills, or a part of it.
        sender: the rank.
        source: the name in the model's state dict.
        held: the part of it that the sender has.
        box: the part of it that is sent.
    """

    output: Output
    read: int
    sender: int
    source: str
    held: Box
    box: Box

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(box_shape(self.box))

    @property
    def num_bytes(self) -> int:
        return self.size * self.output.dtype.itemsize


class _Stream:
    """Brings what the ranks hold to all of them, a buffer at a time."""

    def __init__(self, tensors: dict[str, Tensor], limit: int) -> None:
        self._rank, self._world = world()
        self._limit = limit
        self._local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        self._holders = {name: holders_of(tensor, self._world) for name, tensor in tensors.items()}
        self.device = device_of(tensors.values(), otherwise=next(iter(self._local.values())).device)
        # One for all exchanges: gloo's thread may hold what it sent for an instant after the wait for it.
        self._buffer = torch.empty(limit, dtype=torch.uint8, device=self.device)

    def arrivals(self, outputs: Iterable[Output]) -> Iterator[tuple[_Piece, Tensor]]:
        """The pieces of all tensors, in order, and their elements, which are flat and on the device."""
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
        """Who sends what of a tensor; the same on every rank."""
        shape = tuple(output.moved.shape)
        most = self._limit // output.dtype.itemsize
        for read, (leaf, box, _) in enumerate(
            pull(output.moved, whole(shape), torch.empty(shape, device="meta")).reads
        ):
            for holders, held in self._holders[leaf.name]:
                shared = intersection(box, held)
                for part in _cut(shared, most) if shared is not None else ():
                    # Of several ranks that hold the same, each sends in turn.
                    yield _Piece(output, read, holders[read % len(holders)], leaf.name, held, part)

    def _exchange(self, pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, Tensor]]:
        """Sends pieces from the ranks that hold them to all others; every rank calls it.

        What has arrived lies in the buffer, and must be copied before the next exchange.
        """
        segments: dict[tuple[torch.dtype, int], list[_Piece]] = {}
        for piece in pieces:
            segments.setdefault((piece.output.dtype, piece.sender), []).append(piece)
        parts: dict[_Piece, Tensor] = {}
        requests = []
        start = 0
        # Wide numbers first: each segment starts at a multiple of its own.
        for (dtype, sender), sent in sorted(segments.items(), key=lambda entry: -entry[0][0].itemsize):
            sizes = [piece.size for piece in sent]
            stop = start + sum(sizes) * dtype.itemsize
            segment = self._buffer[start:stop].view(dtype)
            start = stop
            parts |= zip(sent, segment.split(sizes), strict=True)
            if sender == self._rank:
                for piece in sent:
                    own = within(self._local[piece.source], piece.held, piece.box)
                    parts[piece].view(own.shape).copy_(own)
            if self._world > 1:
                requests.append(dist.broadcast(segment, src=sender, async_op=True))
        with watch.operation("stream weights"):
            for request in requests:
                request.wait()
        return ((piece, parts[piece]) for piece in pieces)


def _cut(box: Box, most: int) -> Iterator[Box]:
    """A box in parts of at most `most` elements."""
    size = math.prod(box_shape(box))
    if size <= most:
        yield box
        return
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, (stop - start) * most // size)
    for first in range(start, stop, step):
        yield from _cut((*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :]), most)


def _put_together(output: Output, arriving: Iterable[tuple[_Piece, Tensor]], device: torch.device) -> Tensor:
    """The whole tensor, of its pieces."""
    shape = tuple(output.moved.shape)
    tensor = torch.empty(shape, dtype=output.dtype, device=device)
    part = pull(output.moved, whole(shape), tensor)
    for piece, values in arriving:
        _, box, view = part.reads[piece.read]
        within(view, box, piece.box).copy_(values.view(box_shape(piece.box)))
    finish(part)
    return tensor
