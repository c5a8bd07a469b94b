"""Upstream's initial values for parameters that a checkpoint lacks, the same on any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from patchgen.runtime.checkpoint.placement import local_tensor, shard_like
from patchgen.runtime.parallel.buffers import initialiser_of


@torch.no_grad()
def initialise(model: nn.Module, names: Sequence[str], *, seed: int) -> None:
    """Gives these parameters and buffers the values of upstream's `_init_weights`.

    Each module is initialised in full on the CPU, seeded by its path, and this rank's shard is copied; one module is in
    memory at a time.
    """
    by_module: dict[str, list[str]] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        by_module.setdefault(path, []).append(attribute)
    for path, attributes in by_module.items():
        module = model.get_submodule(path)
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        module_seed = int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:7], "little")
        try:
            for name, parameter in parameters.items():
                if parameter is not None:
                    fresh = torch.zeros(parameter.shape, dtype=parameter.dtype)
                    module._parameters[name] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
            with torch.random.fork_rng(devices=[]):
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
