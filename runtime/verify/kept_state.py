"""What the forward of a model keeps: each compared step starts from the state that the model had before the others.

Two models are compared over several steps, not always in the same order or number. A value that a forward keeps from its first
call, or a buffer that counts calls, would differ for that reason alone.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

_TENSORS_AND_PARTS = ("_parameters", "_modules")
_IMMUTABLE = (type(None), bool, int, float, str, type)


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """After the block, the modules of the model and their configs have the buffers, attributes and hooks that they had before,
    and the parameters their values. Gradients stay; so do globals and attributes of classes."""
    holders = [*model.modules(), *configs_of(model)]
    parameters = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    # One memo: attributes that share a tensor share its copy. What has a copy here is never copied.
    memo = {id(part): part for part in (*holders, *model.parameters())}
    before = [_copied_attributes(holder, memo) for holder in holders]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)
        for holder, attributes in zip(holders, before, strict=True):
            _restore(vars(holder), attributes)


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """The configs that modules hold, and those in them."""
    found: dict[int, PreTrainedConfig] = {}
    pending = [value for module in model.modules() for value in vars(module).values()]
    while pending:
        value = pending.pop()
        if isinstance(value, PreTrainedConfig) and id(value) not in found:
            found[id(value)] = value
            pending += vars(value).values()
    return list(found.values())


def _copied_attributes(holder: object, memo: dict[int, Any]) -> dict[str, Any]:
    copies = {}
    for name, value in vars(holder).items():
        is_of_torch = isinstance(holder, nn.Module) and isinstance(value, dict) and name.startswith("_")
        if is_of_torch and (name in _TENSORS_AND_PARTS or "hooks" in name):
            copies[name] = value, dict(value)
        elif is_of_torch and name == "_buffers":
            copies[name] = value, {key: _copy(buffer, memo) for key, buffer in value.items()}
        else:
            copies[name] = None, _copy(value, memo)
    return copies


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, _IMMUTABLE):  # most attributes, and a deep copy of one costs as much as of a small list
        return value
    if isinstance(value, Tensor) and id(value) not in memo:
        memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError):  # locks, streams: nothing that a forward computes
        return value


def _restore(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    for name, (container, value) in before.items():
        if container is None:
            attributes[name] = value
            continue
        # Handles of hooks refer to the dictionary itself.
        if any(container.get(key) is not kept for key, kept in value.items()) or container.keys() != value.keys():
            container.clear()
            container.update(value)
        attributes[name] = container
