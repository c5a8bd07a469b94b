"""Non-persistent buffers of a model built on the meta device, where they have no values.

Upstream's initialisation of a module computes most. What only a constructor computes, such as rotary tables of files written
for transformers 4, is copied from a second model, built on the CPU with parameters on the meta device.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode


@torch.no_grad()
def compute_buffers(model: nn.Module) -> None:
    """Computes non-persistent buffers, by upstream's initialisation of their module or one around it, else by a constructor.

    Raises:
        ValueError: neither initialises them, nor does the model's constructor compute them.
    """
    pending: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(name)) is not None and buffer.numel():
                pending.setdefault(path, []).append((module, name))
    for buffers in pending.values():
        for module, name in buffers:
            numbers = _numbers(module.get_buffer(name))
            numbers.fill_(_sentinel(numbers))
    for path in list(pending):
        _run_initialiser(model, path)
    for path, buffers in pending.items():
        outer = path
        while outer and _still_sentinel(buffers):
            outer = outer.rpartition(".")[0]
            _run_initialiser(model, outer)
    untouched = [
        f"{path}.{name}".removeprefix(".") for path, buffers in pending.items() for name in _still_sentinel(buffers)
    ]
    constructed = constructed_buffers(model) if untouched else {}
    for name in untouched:
        if name in constructed:
            model.get_buffer(name).copy_(constructed[name])
    if missing := [name for name in untouched if name not in constructed]:
        raise ValueError(
            f"{type(model).__name__} does not initialise its non-persistent buffers {missing[:6]}. To fix: build it on the "
            "CPU instead of the meta device."
        )


def _numbers(buffer: Tensor) -> Tensor:
    """The buffer; booleans as bytes, of which two values are booleans."""
    return buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer


def _sentinel(numbers: Tensor) -> float | int:
    """What no initialiser writes into all of a buffer: NaN, the largest integer, bytes that are no booleans."""
    has_nan = numbers.is_floating_point() or numbers.is_complex()
    return float("nan") if has_nan else torch.iinfo(numbers.dtype).max


def _still_sentinel(buffers: Sequence[tuple[nn.Module, str]]) -> list[str]:
    """The names of the buffers that nothing has written."""
    values = {name: _numbers(module.get_buffer(name)) for module, name in buffers}
    return [
        name
        for name, numbers in values.items()
        if bool(numbers.isnan().any()) or bool((numbers == _sentinel(numbers)).all())
    ]


def _run_initialiser(model: nn.Module, path: str) -> None:
    """Initialises one module; what upstream writes into its parameters is discarded: they come from a checkpoint."""
    module = model.get_submodule(path)
    parameters = dict(module._parameters)
    try:
        for name, parameter in parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, device="meta"))
        initialiser_of(model, path)(module)
    finally:
        module._parameters.update(parameters)


def initialiser_of(model: nn.Module, path: str) -> Callable[[nn.Module], None]:
    """The initialiser of the module at `path`: `_init_weights` of the innermost transformers model around it."""
    owner: Any = model
    module = model
    for name in path.split(".") if path else ():
        module = getattr(module, name)
        if hasattr(module, "_init_weights"):
            owner = module
    return owner._init_weights


def constructed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a transformers model as its constructor computes them, on the CPU; {} for other modules."""
    model_class = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    if not hasattr(model_class, "_from_config"):
        return {}
    config = copy.deepcopy(model.config)
    attention = getattr(config, "_attn_implementation", None)
    with _parameters_on_meta(), torch.random.fork_rng(devices=[]):  # a constructor may use random numbers
        reference = model_class._from_config(config, attn_implementation=attention, dtype=model.dtype)
    return {name: buffer for name, buffer in reference.named_buffers() if not buffer.is_meta}


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` allocates on the meta device, without memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **{**(kwargs or {}), **({"device": "meta"} if function is torch.empty else {})})


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
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
