"""The device that a run is planned for: that of this machine, or another kind, `patchgen train RECIPE --dry-run --device h200`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.train import flops
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe


@dataclass(frozen=True)
class PlannedDevice:
    """One kind of device.

    Attributes:
        name: as torch names a GPU.
        kind: cuda or cpu.
        memory: of one, in bytes; None: not known, as of a CPU, which ranks share.
        is_here: whether this machine has it.
    """

    name: str
    kind: str
    memory: int | None = None
    is_here: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind)

    @property
    def peak_tflops(self) -> float | None:
        """The dense bf16 peak; None if it is not known."""
        return (
            next((peak for gpu, peak in flops.PEAKS.items() if gpu in self.name), None)
            if self.kind == "cuda"
            else None
        )

    @property
    def text(self) -> str:
        """A line for a plan."""
        if self.kind == "cpu":
            return "the CPU" + (
                ", for this machine has no GPU; --device h100, h200 or b200 plans for one" if self.is_here else ""
            )
        size = f"{self.name}, {self.memory / 2**30:.0f} GiB" if self.memory else self.name
        if self.is_here:
            return f"{size}, of this machine"
        return f"{size}, which is not in this machine: kernels and attention are those that can be chosen without it"


# The memory that nvidia-smi reports, in MiB.
GPUS = {"h100": ("NVIDIA H100 80GB HBM3", 81_559), "h200": ("NVIDIA H200", 143_771), "b200": ("NVIDIA B200", 183_359)}
NAMES = (*GPUS, "cpu")


def planned(name: str | None) -> PlannedDevice:
    """The device of a name in `NAMES`; None: that of this machine, a GPU if it has one."""
    here = None
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        here = PlannedDevice(torch.cuda.get_device_name(), "cuda", memory, is_here=True)
    if name is None:
        return here or PlannedDevice("cpu", "cpu", is_here=True)
    if name == "cpu":
        return PlannedDevice("cpu", "cpu")
    long_name, mebibytes = GPUS[name]
    return here if here and name.upper() in here.name else PlannedDevice(long_name, "cuda", mebibytes * 2**20)


def plannable(recipe: Recipe, device: PlannedDevice) -> tuple[Recipe, list[str]]:
    """The recipe as this machine can plan it for `device`, and the keys that only a machine with that device can check.

    Layers compute in the dtype of that device. Kernels, attention and CUDA graphs that cannot run here are left to be chosen.
    """
    if device.is_here:
        return recipe, []
    kernels, unchecked = recipe.kernels, []
    for name, kernel in models.obstructed_kernels(recipe.kernels).items() if device.kind == "cuda" else ():
        kernels = replace(kernels, **{name: None})
        unchecked.append(f"kernels.{name} = {kernel}")
    named = recipe.model.attention
    backend = BACKENDS.get(named) if isinstance(named, str) else None
    if device.kind == "cuda" and backend is not None and backend.unavailable() is not None:
        recipe = replace(recipe, model=replace(recipe.model, attention=None))
        unchecked.append(f"model.attention = {named}")
    if device.kind == "cuda" and recipe.train.cuda_graph and not torch.cuda.is_available():
        recipe = replace(recipe, train=replace(recipe.train, cuda_graph=False))
        unchecked.append("train.cuda_graph = true")
    dtype = str(models.compute_dtype(recipe, device.kind)).removeprefix("torch.")
    return replace(recipe, kernels=kernels, parallel=replace(recipe.parallel, param_dtype=dtype)), unchecked
