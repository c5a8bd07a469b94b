"""A copy of tensors in host memory, made while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from patchgen.runtime.checkpoint.placement import local_tensor


class Staged:
    """Tensors on their way to host memory.

    Attributes:
        tensors: the copies, DTensors where the originals are; complete after `wait`.
    """

    def __init__(self, tensors: dict[str, Tensor], event: torch.cuda.Event | None) -> None:
        self.tensors = tensors
        self._event = event

    def before_change(self) -> None:
        """Lets the device finish copying before what it is told next, which may change the originals."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Blocks until the copies are complete."""
        if self._event is not None:
            self._event.synchronize()


class Staging:
    """Copies this rank's parts of tensors to host memory, pinned and on a stream of its own where they are on a GPU.

    Its buffers are kept from one copy to the next: only one copy can be in use.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Starts copying; the originals must stay as they are until `before_change` or `wait`."""
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
            self._stream.wait_stream(torch.cuda.current_stream())  # what was told to change them comes first
            with torch.cuda.stream(self._stream):
                for name, part in parts.items():
                    self._buffers[name].copy_(part, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
        else:
            for name, part in parts.items():
                self._buffers[name].copy_(part)
        return Staged({name: _like(tensor, self._buffers[name]) for name, tensor in tensors.items()}, event)


def _like(original: Tensor, copy: Tensor) -> Tensor:
    """`copy` as the local part of a DTensor that is laid out as the original is."""
    if not isinstance(original, DTensor):
        return copy
    detached = original.detach()
    assert isinstance(detached, DTensor), "of a DTensor"
    inner, context = detached.__tensor_flatten__()  # from_local would move the copy to the mesh's device
    parts = {name: getattr(original, name) for name in inner} | {"_local_tensor": copy}
    return DTensor.__tensor_unflatten__(parts, context, original.shape, original.stride())
