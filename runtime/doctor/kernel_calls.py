"""Records the calls of the kernels behind the seams of a model."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.runtime import seams
from patchgen.runtime.doctor import calls
from patchgen.runtime.parallel import report

FLAGS = {"is_gated": True, "is_interleaved": False, "is_transposed": False}
"""Flags of `ops.fused_moe` -> their defaults there."""


@dataclass(frozen=True)
class ExpertCall:
    """One call of `ops.fused_moe`: its gate and up weights, and their layout."""

    gate_up: Tensor
    is_gated: bool
    is_interleaved: bool
    is_transposed: bool

    @torch.no_grad()
    def swapped(self) -> Tensor:
        """The weights with gate and up swapped."""
        dim = 2 if self.is_transposed else 1
        if not self.is_interleaved:
            return torch.cat(self.gate_up.chunk(2, dim=dim)[::-1], dim=dim)
        order = torch.arange(self.gate_up.shape[dim], device=self.gate_up.device).view(-1, 2).flip(-1).flatten()
        return self.gate_up.index_select(dim, order)


@contextlib.contextmanager
def observed(on_call: Callable[[str, tuple, dict[str, Any]], None]) -> Iterator[None]:
    """Within the block, passes the seam and the arguments of each kernel call to `on_call`."""
    original = seams.implementation

    def implementation(seam: str) -> Callable:
        kernel = original(seam)

        def call(*args: Any, **kwargs: Any) -> Any:
            on_call(seam, args, kwargs)
            return kernel(*args, **kwargs)

        return call

    seams.implementation = implementation
    try:
        yield
    finally:
        seams.implementation = original


def expert_calls(model: nn.Module, row: Mapping[str, Any], kernels: Mapping[str, str]) -> list[ExpertCall]:
    """The calls of the expert kernel in a forward pass of the row; empty if experts run eager code."""
    recorded: list[ExpertCall] = []

    def on_call(seam: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if seam == "fused_moe":
            flags = {name: kwargs.get(name, default) for name, default in FLAGS.items()}
            recorded.append(ExpertCall(args[3], **flags))

    with observed(on_call):
        calls.loss(model, row, kernels)
    return recorded


def count_kernel_calls(
    model: nn.Module, row: Mapping[str, Any], kernels: Mapping[str, str]
) -> tuple[dict[str, Counter], dict[str, list[str]]]:
    """The number of calls of each kernel by the path of the calling module, and the modules that ran without calling the
    kernels of their seams."""
    classes_of_seams = report.seam_users(model)
    counts = {seam: Counter() for seam in kernels}
    stack: list[str] = []
    ran: dict[str, list[str]] = {seam: [] for seam in kernels}

    def on_call(seam: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if seam in counts:
            counts[seam][stack[-1] if stack else ""] += 1

    def record_exit(paths_of_seams: list[list[str]], *_: Any) -> None:
        path = stack.pop()
        for paths in paths_of_seams:
            paths.append(path)

    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            paths_of_seams = [ran[seam] for seam in kernels if type(module).__name__ in classes_of_seams.get(seam, ())]
            if paths_of_seams:
                hooks.enter_context(module.register_forward_pre_hook(lambda *_, path=path: stack.append(path)))
                hooks.enter_context(module.register_forward_hook(functools.partial(record_exit, paths_of_seams)))
        hooks.enter_context(observed(on_call))
        calls.loss(model, row, kernels)
    return counts, {seam: [path for path in dict.fromkeys(ran[seam]) if not counts[seam][path]] for seam in kernels}
