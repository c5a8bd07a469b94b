"""A model larger than memory: its layers have weights only while they compute.

             embeddings, head, norms    layer 0    layer 1   ...   layer 47
in layer 0   held                       held       -               -
in layer 1   held                       -          held            -

What lies around the layers is held always, then as many layers as the limit has room for. A layer that is not held
stands there with its shapes and NaN: what reads it without calling it is seen. A backward computes each layer again from
its inputs, its weights read a second time.
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

from patchgen.runtime.doctor.finding import told_size
from patchgen.runtime.parallel import buffers, sharding

Change = tuple[Tensor, Callable[[], Tensor]]
"""A tensor of a model, and what computes other values of it from the model as it is."""
Read = Callable[[Mapping[str, Tensor]], None]
"""Fills tensors of a model by their names in its state dict."""


class DoesNotFit(Exception):
    """Not even one layer fits beside what lies around the layers."""


class Layerwise:
    """The weights of a model that was built on the meta device.

    Args:
        device: what it computes on.
        read: fills tensors of the model; called again each time that a layer is needed.
        limit: the most bytes of parameters that are held at once.

    Attributes:
        held_bytes: now.
        peak_bytes: the most so far.

    Raises:
        DoesNotFit: with what the smallest part takes.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, read: Read, limit: int) -> None:
        self._read, self._limit, self._device = read, limit, device
        self._layers = sharding.find_layers(model, None)
        layer_of = {id(p): number for number, layer in enumerate(self._layers) for p in layer.parameters()}
        named = {name: p for name, p in model.named_parameters() if id(p) not in layer_of}
        sizes = [_bytes(layer.parameters()) for layer in self._layers]
        least = _bytes(named.values()) + max(sizes)
        if least > limit:
            raise DoesNotFit(f"the largest layer and what lies around the layers take {told_size(least)}")
        _compute_buffers(model, device)
        new = _replaced(model, device)
        self._layer_of = {id(new[old]): number for old, number in layer_of.items()}
        self._own: list[dict[str, nn.Parameter]] = [{} for _ in self._layers]
        around = {}
        for name, parameter in model.named_parameters():
            number = self._layer_of.get(id(parameter))
            (around if number is None else self._own[number])[name] = parameter
        self._changes: dict[int, dict[int, Change]] = {}
        self._held: list[int] = []  # the last is the one that computes
        self.held_bytes = self.peak_bytes = 0
        self._fill(around)
        saved = model.state_dict()
        read({name: buffer for name, buffer in model.named_buffers() if name in saved})
        for number, layer in enumerate(self._layers):
            layer.forward = self._holding(number, layer.forward)

    def read_all(self) -> None:
        """Reads each layer once, to see what cannot be read."""
        for number in range(len(self._layers)):
            self._hold(number)

    @contextlib.contextmanager
    def changed(self, changes: Sequence[Change]) -> Iterator[None]:
        """Other values in some of the tensors, those of a layer whenever it is held."""
        in_layers = [change for change in changes if id(change[0]) in self._layer_of]
        around = [change for change in changes if id(change[0]) not in self._layer_of]
        for parameter, compute in in_layers:
            number = self._layer_of[id(parameter)]
            self._drop(number)
            self._changes.setdefault(number, {})[id(parameter)] = parameter, compute
        try:
            with changed(around):
                yield
        finally:
            for number in list(self._changes):
                self._drop(number)
            self._changes.clear()

    def _holding(self, number: int, forward: Callable) -> Callable:
        """The forward of a layer that holds its weights; with gradients it runs again in the backward."""

        @functools.wraps(forward)
        def compute(*args: Any, **kwargs: Any) -> Any:
            self._hold(number)
            return forward(*args, **kwargs)

        @functools.wraps(forward)
        def held(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return checkpoint(compute, *args, use_reentrant=False, **kwargs)
            return compute(*args, **kwargs)

        return held

    def _hold(self, number: int) -> None:
        """Makes room and reads. Dropped are the latest: the next pass begins with the first."""
        if number in self._held:
            self._held.remove(number)
            self._held.append(number)
            return
        needed = _bytes(self._own[number].values())
        while self._held and self.held_bytes + needed > self._limit:
            self._drop(self._held[-1])
        self._fill(self._own[number])
        self._held.append(number)
        changes = list(self._changes.get(number, {}).values())
        _set(changes, _values(changes))

    def _fill(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.held_bytes += _bytes(parameters.values())
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        for parameter in parameters.values():
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
        self._read({name: parameter.data for name, parameter in parameters.items()})

    def _drop(self, number: int) -> None:
        if number not in self._held:
            return
        self._held.remove(number)
        for parameter in self._own[number].values():
            parameter.data = _absent(parameter, self._device)
        self.held_bytes -= _bytes(self._own[number].values())


@contextlib.contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """Other values in tensors that are there, each computed before any is set."""
    values = _values(changes)
    before = [tensor.detach().clone() for tensor, _ in changes]
    try:
        _set(changes, values)
        yield
    finally:
        _set(changes, before)


@torch.no_grad()
def _values(changes: Sequence[Change]) -> list[Tensor]:
    return [compute() for _, compute in changes]


@torch.no_grad()
def _set(changes: Sequence[Change], values: Sequence[Tensor]) -> None:
    for (tensor, _), value in zip(changes, values, strict=True):
        tensor.data.copy_(value)  # no gradient is taken of what was there


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _absent(parameter: Tensor, device: torch.device) -> Tensor:
    """A tensor of this shape, every element of which is one and the same NaN."""
    return torch.full((), float("nan"), dtype=parameter.dtype, device=device).expand(parameter.shape)


def _compute_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
    buffers.compute_buffers(model)


def _replaced(model: nn.Module, device: torch.device) -> dict[int, nn.Parameter]:
    """Parameters on the device without memory for those on meta, tied ones once; by the id of the old."""
    new: dict[int, nn.Parameter] = {}
    old = []  # kept, so that no id is given twice
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in new:
                old.append(parameter)
                new[id(parameter)] = nn.Parameter(_absent(parameter, device), requires_grad=parameter.requires_grad)
            module._parameters[name] = new[id(parameter)]
    return new
