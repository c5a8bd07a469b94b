"""Upstream's initial values for parameters that a checkpoint lacks, the same on any number of ranks and cores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from patchgen.runtime.checkpoint.placement import local_tensor, shard_like
from patchgen.runtime.parallel.buffers import initialiser_of

PART = 2**22
"""Values that one thread draws at once, from a generator of their own; smaller tensors are drawn by torch as a whole. A change
changes the values of all larger tensors."""
_DRAWS = {  # function -> the method that fills a part, and the names of its arguments, whose defaults are 0 and 1
    nn.init.normal_: ("normal_", ("tensor", "mean", "std")),
    Tensor.normal_: ("normal_", ("tensor", "mean", "std")),
    nn.init.uniform_: ("uniform_", ("tensor", "a", "b")),
    Tensor.uniform_: ("uniform_", ("tensor", "from", "to")),
}


@torch.no_grad()
def initialise(model: nn.Module, names: Sequence[str], *, seed: int) -> None:
    """Gives these parameters and buffers the values of upstream's `_init_weights`.

    Each module is initialised in full on the CPU, seeded by its path, and this rank's shard is copied; one module is in
    memory at a time. Large tensors are drawn by all cores that this rank has.
    """
    by_module: dict[str, list[str]] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        by_module.setdefault(path, []).append(attribute)
    with ThreadPoolExecutor(_num_threads()) as threads:
        zeros, draws = _Zeros(threads), _PartDraws(threads)
        for path, attributes in by_module.items():
            module = model.get_submodule(path)
            parameters, buffers = dict(module._parameters), dict(module._buffers)
            module_seed = int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:7], "little")
            tensors = [tensor for tensor in (*parameters.values(), *buffers.values()) if tensor is not None]
            fresh = dict(zip(map(id, tensors), zeros.like(tensors), strict=True))
            try:
                for name, parameter in parameters.items():
                    if parameter is not None:
                        requires_grad = parameter.requires_grad
                        module._parameters[name] = nn.Parameter(fresh[id(parameter)], requires_grad=requires_grad)
                for name, buffer in buffers.items():
                    if buffer is not None:
                        module._buffers[name] = fresh[id(buffer)]
                with torch.random.fork_rng(devices=[]), draws:
                    torch.manual_seed(module_seed)
                    initialiser_of(model, path)(module)
                initialised = {name: (module._parameters | module._buffers)[name] for name in attributes}
            finally:
                module._parameters.update(parameters)
                module._buffers.update(buffers)
            for name, value in initialised.items():
                target = (parameters | buffers)[name]
                assert value is not None and target is not None, "a name of the state dict"
                shard = shard_like(value, target) if isinstance(target, DTensor) else value
                local_tensor(target).copy_(shard)


def _num_threads() -> int:
    """The cores of this process, shared with the other ranks of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class _Zeros:
    """Zeros for one module after the other, in the same memory: pages that the system gives anew cost more than what is drawn."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Zeros on the CPU with the shapes and dtypes of these; those of the last call are overwritten."""
        sizes = [-(-tensor.numel() * tensor.element_size() // 64) * 64 for tensor in tensors]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
        list(self._threads.map(Tensor.zero_, self._memory[: sum(sizes)].split(4 * PART)))
        parts = self._memory[: sum(sizes)].split(sizes)
        return [
            part[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]


class _PartDraws(TorchFunctionMode):
    """Draws large tensors in parts, each by a thread, from a generator seeded by the default one and the number of the part."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        super().__init__()
        self._threads = threads

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _DRAWS:
            method, names = _DRAWS[function]
            values = dict(zip(names, args, strict=False)) | kwargs
            tensor, generator = values.pop("tensor"), values.pop("generator", None)
            is_plain = (
                type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.is_contiguous()
            )
            if generator is None and is_plain and tensor.numel() > PART:
                self._draw(tensor.detach().view(-1), method, values.get(names[1], 0.0), values.get(names[2], 1.0))
                return tensor
        return function(*args, **kwargs)

    def _draw(self, flat: Tensor, method: str, *values: float) -> None:
        seed = int(torch.randint(2**62, ()))

        def draw(number: int, part: Tensor) -> None:
            digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            getattr(part, method)(*values, generator=generator)

        parts = flat.split(PART)
        list(self._threads.map(draw, range(len(parts)), parts))
