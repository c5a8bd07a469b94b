"""A model larger than memory: a layer's weights are loaded before it computes and freed when another needs the memory.

If only one layer fits:

             embeddings, head, norms    layer 0    layer 1   ...   layer 47
in layer 0   loaded                     loaded     -               -
in layer 1   loaded                     -          loaded          -

Parameters outside the layers are always loaded; of the layers, as many stay loaded as fit. An unloaded layer has
parameters of NaN in their shapes, so that code which reads them without calling the layer is noticed. The backward pass
recomputes each layer from its inputs, and reads its weights again if they were freed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from patchgen.runtime.doctor.finding import format_bytes
from patchgen.runtime.parallel import buffers, sharding

Change = tuple[Tensor, Callable[[], Tensor]]
"""A tensor of a model, and a function that computes other values for it."""
Read = Callable[[Mapping[str, Tensor]], None]
"""Fills tensors of a model with their weights; they are given by their names in its state dict."""


class DoesNotFit(Exception):
    """The parameters outside the layers and the largest layer exceed the limit."""


class Layerwise:
    """The weights of a model that was built on the meta device.

    Args:
        read: fills tensors of the model; called again each time that a layer is loaded.
        limit: the most bytes of parameters that may be loaded at once.

    Attributes:
        loaded_bytes: of the parameters that are loaded now.

    Raises:
        DoesNotFit: even one layer at a time exceeds the limit; the message says how many bytes it takes.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, read: Read, limit: int) -> None:
        self._read, self._limit, self._device = read, limit, device
        self._layers = sharding.find_layers(model, None)
        layer_of = {id(p): number for number, layer in enumerate(self._layers) for p in layer.parameters()}
        named = {name: p for name, p in model.named_parameters() if id(p) not in layer_of}
        sizes = [_bytes(layer.parameters()) for layer in self._layers]
        least = _bytes(named.values()) + max(sizes)
        if least > limit:
            raise DoesNotFit(f"the largest layer and the parameters outside the layers take {format_bytes(least)}")
        _compute_buffers(model, device)
        new = _replace_parameters(model, device)
        self._layer_of = {id(new[old]): number for old, number in layer_of.items()}
        self._layer_parameters: list[dict[str, nn.Parameter]] = [{} for _ in self._layers]
        outside = {}
        for name, parameter in model.named_parameters():
            number = self._layer_of.get(id(parameter))
            (outside if number is None else self._layer_parameters[number])[name] = parameter
        self._changes: dict[int, dict[int, Change]] = {}
        self._loaded: list[int] = []  # the last is the layer that computes now
        self.loaded_bytes = 0
        self._fill(outside)
        saved = model.state_dict()
        read({name: buffer for name, buffer in model.named_buffers() if name in saved})
        for number, layer in enumerate(self._layers):
            layer.forward = self._loading_forward(number, layer.forward)

    def read_all(self) -> None:
        """Loads each layer once, so that errors in reading any of them are raised here."""
        for number in range(len(self._layers)):
            self._load(number)

    @contextlib.contextmanager
    def changed(self, changes: Sequence[Change]) -> Iterator[None]:
        """A block in which some tensors have other values; those of a layer get them whenever the layer is loaded."""
        in_layers = [change for change in changes if id(change[0]) in self._layer_of]
        outside = [change for change in changes if id(change[0]) not in self._layer_of]
        for parameter, compute in in_layers:
            number = self._layer_of[id(parameter)]
            self._free(number)
            self._changes.setdefault(number, {})[id(parameter)] = parameter, compute
        try:
            with changed(outside):
                yield
        finally:
            for number in list(self._changes):
                self._free(number)
            self._changes.clear()

    def _loading_forward(self, number: int, forward: Callable) -> Callable:
        """The forward of a layer that loads its weights first; with gradients it is recomputed in the backward pass."""

        @functools.wraps(forward)
        def load_and_compute(*args: Any, **kwargs: Any) -> Any:
            self._load(number)
            return forward(*args, **kwargs)

        @functools.wraps(forward)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return checkpoint(load_and_compute, *args, use_reentrant=False, **kwargs)
            return load_and_compute(*args, **kwargs)

        return checkpointed

    def _load(self, number: int) -> None:
        """Reads a layer, and frees others for it: the latest first, because the next pass begins with the first layer."""
        if number in self._loaded:
            self._loaded.remove(number)
            self._loaded.append(number)
            return
        needed = _bytes(self._layer_parameters[number].values())
        while self._loaded and self.loaded_bytes + needed > self._limit:
            self._free(self._loaded[-1])
        self._fill(self._layer_parameters[number])
        self._loaded.append(number)
        changes = list(self._changes.get(number, {}).values())
        _copy_values(changes, _compute_values(changes))

    def _fill(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.loaded_bytes += _bytes(parameters.values())
        for parameter in parameters.values():
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
        self._read({name: parameter.data for name, parameter in parameters.items()})

    def _free(self, number: int) -> None:
        if number not in self._loaded:
            return
        self._loaded.remove(number)
        for parameter in self._layer_parameters[number].values():
            parameter.data = _unloaded(parameter, self._device)
        self.loaded_bytes -= _bytes(self._layer_parameters[number].values())


@contextlib.contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """A block in which some loaded tensors have other values; all are computed before any is copied."""
    values = _compute_values(changes)
    before = [tensor.detach().clone() for tensor, _ in changes]
    try:
        _copy_values(changes, values)
        yield
    finally:
        _copy_values(changes, before)


@torch.no_grad()
def _compute_values(changes: Sequence[Change]) -> list[Tensor]:
    return [compute() for _, compute in changes]


@torch.no_grad()
def _copy_values(changes: Sequence[Change], values: Sequence[Tensor]) -> None:
    for (tensor, _), value in zip(changes, values, strict=True):
        tensor.data.copy_(value)  # not seen by autograd


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _unloaded(parameter: Tensor, device: torch.device) -> Tensor:
    """A tensor of this shape without memory: all its elements are one NaN."""
    return torch.full((), float("nan"), dtype=parameter.dtype, device=device).expand(parameter.shape)


def _compute_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
    buffers.compute_buffers(model)


def _replace_parameters(model: nn.Module, device: torch.device) -> dict[int, nn.Parameter]:
    """Replaces meta parameters by unloaded ones on the device, tied ones once; returns the new ones by the id of the old."""
    new: dict[int, nn.Parameter] = {}
    old = []  # kept alive, so that no id is reused
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in new:
                old.append(parameter)
                new[id(parameter)] = nn.Parameter(_unloaded(parameter, device), requires_grad=parameter.requires_grad)
            module._parameters[name] = new[id(parameter)]
    return new
