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

LAYOUT_DEFAULTS = {"is_gated": True, "is_interleaved": False, "is_transposed": False}
"""Arguments of `ops.fused_moe` that say how its weights are laid out -> their defaults there."""


@dataclass(frozen=True)
class ExpertCall:
    """One call of `ops.fused_moe`: its gate and up weights, and their layout."""

    gate_up: Tensor
    is_gated: bool
    is_interleaved: bool
    is_transposed: bool

    @torch.no_grad()
    def swapped_gate_up(self) -> Tensor:
        """`gate_up` with gate and up swapped, a copy. Only if `is_gated`: otherwise there is no gate."""
        dim = 2 if self.is_transposed else 1
        if not self.is_interleaved:
            return torch.cat(self.gate_up.chunk(2, dim=dim)[::-1], dim=dim)
        order = torch.arange(self.gate_up.shape[dim], device=self.gate_up.device).view(-1, 2).flip(-1).flatten()
        return self.gate_up.index_select(dim, order)


@contextlib.contextmanager
def intercepting_kernels(on_call: Callable[[str, tuple, dict[str, Any]], None]) -> Iterator[None]:
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
            flags = {name: kwargs.get(name, default) for name, default in LAYOUT_DEFAULTS.items()}
            recorded.append(ExpertCall(args[3], **flags))  # `ops.fused_moe` passes gate_up_proj as the fourth

    with intercepting_kernels(on_call):
        calls.loss(model, row, kernels)  # runs the forward
    return recorded


def count_kernel_calls(
    model: nn.Module, row: Mapping[str, Any], kernels: Mapping[str, str]
) -> tuple[dict[str, Counter], dict[str, list[str]]]:
    """The number of calls of each kernel by the path of the calling module, and the modules that ran without calling the
    kernels of their seams."""
    classes_of_seams = report.seam_users(model)
    counts = {seam: Counter() for seam in kernels}
    running_paths: list[str] = []
    paths_that_ran: dict[str, list[str]] = {seam: [] for seam in kernels}

    def on_call(seam: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if seam in counts:
            counts[seam][running_paths[-1] if running_paths else ""] += 1

    def record_exit(lists_to_extend: list[list[str]], *_: Any) -> None:
        path = running_paths.pop()
        for paths in lists_to_extend:
            paths.append(path)

    with contextlib.ExitStack() as contexts:
        for path, module in model.named_modules():
            class_name = type(module).__name__
            lists_to_extend = [
                paths_that_ran[seam] for seam in kernels if class_name in classes_of_seams.get(seam, ())
            ]
            if lists_to_extend:
                contexts.enter_context(
                    module.register_forward_pre_hook(lambda *_, path=path: running_paths.append(path))
                )
                contexts.enter_context(module.register_forward_hook(functools.partial(record_exit, lists_to_extend)))
        contexts.enter_context(intercepting_kernels(on_call))
        calls.loss(model, row, kernels)  # runs the forward
    inactive = {
        seam: [path for path in dict.fromkeys(paths_that_ran[seam]) if not counts[seam][path]] for seam in kernels
    }
    return counts, inactive
