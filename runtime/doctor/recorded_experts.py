"""What the experts and the other seams of a model are called with, recorded as a row goes through it."""

from __future__ import annotations

import contextlib
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
"""Of `ops.fused_moe`, with its defaults."""


@dataclass(frozen=True)
class ExpertCall:
    """One call of `ops.fused_moe`: its weights as the model holds them, and how they lie."""

    gate_up: Tensor
    is_gated: bool
    is_interleaved: bool
    is_transposed: bool

    @torch.no_grad()
    def exchanged(self) -> Tensor:
        """The same weights with gate and up in each other's place."""
        dim = 2 if self.is_transposed else 1
        if not self.is_interleaved:
            return torch.cat(self.gate_up.chunk(2, dim=dim)[::-1], dim=dim)
        order = torch.arange(self.gate_up.shape[dim], device=self.gate_up.device).view(-1, 2).flip(-1).flatten()
        return self.gate_up.index_select(dim, order)


@contextlib.contextmanager
def listening(note: Callable[[str, tuple, dict[str, Any]], None]) -> Iterator[None]:
    """Tells `note` of each call of a kernel behind a seam: the seam, and the arguments."""
    find = seams.implementation

    def implementation(seam: str) -> Callable:
        kernel = find(seam)

        def serve(*args: Any, **kwargs: Any) -> Any:
            note(seam, args, kwargs)
            return kernel(*args, **kwargs)

        return serve

    seams.implementation = implementation
    try:
        yield
    finally:
        seams.implementation = find


def expert_calls(model: nn.Module, row: Mapping[str, Any], chosen: Mapping[str, str]) -> list[ExpertCall]:
    """The calls of experts as a row goes through the model; none where no kernel serves them."""
    found: list[ExpertCall] = []

    def note(seam: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if seam == "fused_moe":
            flags = {name: kwargs.get(name, default) for name, default in FLAGS.items()}
            found.append(ExpertCall(args[3], **flags))

    with listening(note):
        calls.loss(model, row, chosen)
    return found


def active_users(
    model: nn.Module, row: Mapping[str, Any], chosen: Mapping[str, str]
) -> tuple[dict[str, Counter], dict[str, list[str]]]:
    """Calls of each kernel by the path of the module that made them, and the modules that ran, have the seam, and made none."""
    users = report.seam_users(model)
    counts = {seam: Counter() for seam in chosen}
    running: list[str] = []
    ran: dict[str, list[str]] = {seam: [] for seam in chosen}
    handles = []
    for path, module in model.named_modules():
        own = [seam for seam in chosen if type(module).__name__ in users.get(seam, ())]
        if own:
            handles.append(module.register_forward_pre_hook(_enters(path, running)))
            handles.append(module.register_forward_hook(_leaves(path, running, [ran[seam] for seam in own])))

    def note(seam: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if seam in counts:
            counts[seam][running[-1] if running else ""] += 1

    try:
        with listening(note):
            calls.loss(model, row, chosen)
    finally:
        for handle in handles:
            handle.remove()
    return counts, {seam: [path for path in dict.fromkeys(ran[seam]) if not counts[seam][path]] for seam in chosen}


def _enters(path: str, running: list[str]) -> Callable:
    def enter(*_: Any) -> None:
        running.append(path)

    return enter


def _leaves(path: str, running: list[str], ran: list[list[str]]) -> Callable:
    def leave(*_: Any) -> None:
        running.pop()
        for paths in ran:
            paths.append(path)

    return leave
