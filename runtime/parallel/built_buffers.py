"""Buffers that a model's constructor computes and nothing else does: rotary tables of files that were written for transformers 4.

On the meta device their values are never there, and no checkpoint holds them. The model is built once more, its parameters
without memory, and its buffers are taken over.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode


def built_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a transformers model, on the host, as the constructor of its class computes them; none of other modules."""
    model_class = next(one for one in type(model).__mro__ if not issubclass(one, FSDPModule))
    if not hasattr(model_class, "_from_config"):
        return {}
    config = copy.deepcopy(model.config)
    attention = getattr(config, "_attn_implementation", None)
    with _parameters_without_memory(), torch.random.fork_rng(devices=[]):  # a constructor may draw
        built = model_class._from_config(config, attn_implementation=attention, dtype=model.dtype)
    return {name: buffer for name, buffer in built.named_buffers() if not buffer.is_meta}


class _EmptyOnMeta(TorchFunctionMode):
    """What `torch.empty` makes holds no values, and needs no memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **{**(kwargs or {}), **({"device": "meta"} if function is torch.empty else {})})


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with _EmptyOnMeta(), torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register
