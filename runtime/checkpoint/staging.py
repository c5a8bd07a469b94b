"""Copies tensors to host memory while training continues."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from patchgen.runtime.checkpoint.placement import local_tensor


class Staged:
    """A copy to host memory in progress.

    Attributes:
        tensors: the copies, DTensors where the originals are; complete after `wait`.
    """

    def __init__(self, tensors: dict[str, Tensor], event: torch.cuda.Event | None) -> None:
        self.tensors = tensors
        self._event = event

    def make_stream_wait(self) -> None:
        """Makes the current stream wait for the copies: what is queued on it next may change the originals."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Blocks until the copies are complete."""
        if self._event is not None:
            self._event.synchronize()


class Staging:
    """Copies this rank's shards to host memory; from a GPU into pinned memory, on a separate stream.

    Buffers are reused by the next copy, so only one copy can be in use.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Starts copying; the originals must not change before `make_stream_wait` or `wait` was called."""
        parts = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        on_device = any(part.is_cuda for part in parts.values())
        for name in self._buffers.keys() - parts.keys():
            del self._buffers[name]
        for name, part in parts.items():
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (part.shape, part.dtype):
                self._buffers[name] = torch.empty(
                    part.shape, dtype=part.dtype, device="cpu", pin_memory=part.is_cuda and part.numel() > 0
                )
        event = None
        if on_device:
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())  # updates that are already queued come first
            with torch.cuda.stream(self._stream):
                for name, part in parts.items():
                    self._buffers[name].copy_(part, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
        else:
            for name, part in parts.items():
                self._buffers[name].copy_(part)
        return Staged({name: _wrap_like(tensor, self._buffers[name]) for name, tensor in tensors.items()}, event)


def _wrap_like(original: Tensor, copy: Tensor) -> Tensor:
    """`copy` as the local tensor of a DTensor with the layout of `original`."""
    if not isinstance(original, DTensor):
        return copy
    detached = original.detach()
    assert isinstance(detached, DTensor), "detach keeps the class"
    inner, context = detached.__tensor_flatten__()  # from_local would move the copy to the mesh's device
    parts = {name: getattr(original, name) for name in inner} | {"_local_tensor": copy}
    return DTensor.__tensor_unflatten__(parts, context, original.shape, original.stride())
