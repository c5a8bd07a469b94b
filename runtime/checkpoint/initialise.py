"""Upstream's initial values for parameters that a checkpoint lacks: the same on any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from patchgen.runtime.checkpoint.placement import local_tensor, part_of_rank
from patchgen.runtime.parallel.buffers import initialiser_of


@torch.no_grad()
def initialise(model: nn.Module, names: Sequence[str], *, seed: int) -> None:
    """Gives these parameters and buffers the values of upstream's `_init_weights`.

    Each module is initialised whole on the CPU, from a seed of its path, and this rank's part is copied: one module of
    new parameters is in memory at a time.
    """
    by_module: dict[str, list[str]] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        by_module.setdefault(path, []).append(attribute)
    for path, attributes in by_module.items():
        module = model.get_submodule(path)
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        seeded = int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:7], "little")
        try:
            for name, parameter in parameters.items():
                if parameter is not None:
                    fresh = torch.zeros(parameter.shape, dtype=parameter.dtype)
                    module._parameters[name] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seeded)
                initialiser_of(model, path)(module)
            made = {name: (module._parameters | module._buffers)[name] for name in attributes}
        finally:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        for name, value in made.items():
            target = (parameters | buffers)[name]
            assert value is not None and target is not None, "a name of the state dict"
            part = part_of_rank(value, target) if isinstance(target, DTensor) else value
            local_tensor(target).copy_(part)
