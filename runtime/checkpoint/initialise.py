"""Upstream's initial values for parameters that a checkpoint lacks, the same on any number of ranks and cores."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from patchgen.runtime.checkpoint.placement import local_tensor, shard_like
from patchgen.runtime.parallel.buffers import initialiser_of
from patchgen.runtime.parallel.tables import ShardedTable

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
    memory at a time. Large tensors are drawn by all cores that this rank has. Of a row-sharded table only this rank's rows are
    drawn: the whole may not fit in memory.
    """
    by_module: dict[str, list[str]] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        by_module.setdefault(path, []).append(attribute)
    with ThreadPoolExecutor(_num_threads()) as threads:
        zeros, draws = _Zeros(threads), _PartDraws(threads)
        for path, attributes in by_module.items():
            module_seed = int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:7], "little")
            with torch.random.fork_rng(devices=[]):
                if "weight" in attributes and _draw_rows(model, path, draws, module_seed):
                    attributes.remove("weight")
                _initialise_whole(model, path, attributes, zeros, draws, module_seed)


def _initialise_whole(
    model: nn.Module, path: str, attributes: Sequence[str], zeros: _Zeros, draws: _PartDraws, module_seed: int
) -> None:
    """Initialises a module in full and copies this rank's shards of the attributes."""
    if not attributes:
        return
    module = model.get_submodule(path)
    parameters, buffers = dict(module._parameters), dict(module._buffers)
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
        with draws:
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


def _draw_rows(model: nn.Module, path: str, draws: _PartDraws, module_seed: int) -> bool:
    """Draws this rank's rows of a large row-sharded table: the values that they have in the whole one.

    Returns:
        Whether it did: upstream draws the weight by one of `_DRAWS`. What else it does to it is the row of `padding_idx`, zeros.
    """
    table = model.get_submodule(path)
    if not isinstance(table, ShardedTable) or table.weight.numel() <= PART:
        return False
    weight, rows = table.weight, table.sharded_rows
    shard, first = local_tensor(weight), rows.first_rows[dist.get_rank(rows.group)]
    try:
        whole = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        table._parameters["weight"] = nn.Parameter(whole, requires_grad=weight.requires_grad)
        with draws.of_rows(shard.view(-1), first * table.embedding_dim), draws:
            torch.manual_seed(module_seed)
            initialiser_of(model, path)(table)
    finally:
        table._parameters["weight"] = weight
    if table.padding_idx is not None and 0 <= table.padding_idx - first < shard.shape[0]:
        shard[table.padding_idx - first].zero_()
    return draws.drew_rows


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
        self._rows: tuple[Tensor, int] | None = None
        self.drew_rows = False

    @contextlib.contextmanager
    def of_rows(self, flat: Tensor, first: int) -> Iterator[None]:
        """Draws, of a large tensor on the meta device, the values from the one numbered `first` on, to `flat`."""
        self._rows, self.drew_rows = (flat, first), False
        try:
            yield
        finally:
            self._rows = None

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _DRAWS:
            method, names = _DRAWS[function]
            values = dict(zip(names, args, strict=False)) | kwargs
            tensor, generator = values.pop("tensor"), values.pop("generator", None)
            is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous() and tensor.numel() > PART
            arguments = method, values.get(names[1], 0.0), values.get(names[2], 1.0)
            if generator is None and is_plain and tensor.device.type == "cpu":
                self._draw(tensor.detach().view(-1), 0, tensor.numel(), *arguments)
                return tensor
            if generator is None and is_plain and tensor.is_meta and self._rows is not None:
                self._draw(*self._rows, tensor.numel(), *arguments)
                self.drew_rows = True
                return tensor
        return function(*args, **kwargs)

    def _draw(self, flat: Tensor, first: int, total: int, method: str, *values: float) -> None:
        """Draws to `flat` those of `total` values that begin with the one numbered `first`."""
        seed = int(torch.randint(2**62, ()))

        def draw(number: int) -> None:
            digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            start, stop = number * PART, min((number + 1) * PART, total)
            begin, end = max(start, first), min(stop, first + flat.numel())
            target = flat[begin - first : end - first]
            if target.device.type == "cpu" and (begin, end) == (start, stop):
                getattr(target, method)(*values, generator=generator)
            else:
                part = torch.empty(stop - start, dtype=flat.dtype)
                target.copy_(getattr(part, method)(*values, generator=generator)[begin - start : end - start])

        list(self._threads.map(draw, range(first // PART, -(-(first + flat.numel()) // PART))))
