"""Copies between host and device that neither waits for: rows and counts of a step to the device, its figures back.

A copy from pageable host memory, and a number made a tensor of the device, wait until the device has done all that was launched.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from patchgen.runtime.parallel import watch


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor in memory from which a copy to this device does not block."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_pinned() else tensor


def on_device(value: Tensor | float, device: torch.device) -> Tensor:
    """A host tensor, or a number, on the device from the current stream's next kernel on."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    return pinned(tensor, device).to(device, non_blocking=True)


class HostCopies:
    """Tensors on their way to the host.

    Args:
        tensors: by name, none of which is needed on the device any more; those of the host are kept as they are.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._copies: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None
        for name, tensor in tensors.items():
            copy = tensor
            if tensor.is_cuda:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copy.copy_(tensor, non_blocking=True)
                self._event = self._event or torch.cuda.Event()
            self._copies[name] = copy
        if self._event is not None:
            self._event.record()

    def read(self, operation: str) -> dict[str, Tensor]:
        """The copies, once they have arrived; `operation` describes the wait in reports of stalls."""
        if self._event is not None:
            with watch.operation(operation):
                self._event.synchronize()
        return self._copies
