"""Where routers select experts: seen, replaced, and kept for layers that are computed again.

    block (router, experts)
      scores  [T, C]                    softmax, sigmoid, groups, bias: as upstream has it
      values, index = topk(scores, K)   <- here: index may be another's, values are gathered at it
      weights [T, K]                    from values, or gathered at index; normalised, scaled: as upstream has it
      experts(hidden, index, weights)

Every router selects by `topk`, whatever comes before and after it, so a selection is replaced there and weights follow with their
gradient. While a block runs, up to the call of its experts, its `topk` calls are taken by a torch function mode; upstream's code
and generated files are as they were. The selection of experts is the `topk` over at least as many scores as there are experts;
one over fewer chooses groups. Where several have K of all scores, each is that selection, and the last is recorded.

A layer that activation checkpointing computes again selects what it selected first, also where scores tie or a kernel sums in
another order: its gradient would be that of other experts, and with expert parallelism rows would not fit.

    T tokens   C classes: experts, and what else a router chooses from   K experts per token   G groups
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchgen.runtime.parallel import checkpointing
from patchgen.runtime.parallel.experts_calls import num_experts_of, routing_index

_EXPERTS = "_patchgen_experts_of_block"  # on a block: a tuple, which is no submodule, and is copied with the block


class Watcher(Protocol):
    """Sees what routers select, and may replace it (`WATCHERS`)."""

    def names(self, experts: nn.Module) -> str | None:
        """The name of experts of the watched model; None: they are of another."""

    def wanted(self, name: str, num_tokens: int, device: torch.device) -> Tensor | None:
        """The experts `(T, K)` to select, negative for tokens whose router selects; None: it selects for all."""

    def given(self, name: str, selected: Tensor | None, num_replaced: int, index: Tensor | None) -> None:
        """Experts are about to be called, not again for a backward.

        Args:
            selected: `(T, K)`, what `topk` returned; None: nothing was selected by it.
            num_replaced: how many selections were replaced.
            index: what the experts are given, int; None: they are not told.
        """


WATCHERS: list[Watcher] = []
"""Those of the running contexts, outermost first."""


def index_dtype(num_classes: int) -> torch.dtype:
    """The smallest dtype for indices of classes and -1."""
    return torch.int8 if num_classes <= 128 else torch.int16 if num_classes <= 32768 else torch.int32


def name_of(path: str) -> str:
    """The path of an experts module without PEFT's wrappers, which adapters add."""
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
    return path


def install(model: nn.Module, experts_paths: Iterable[str]) -> None:
    """Lets selections in the blocks around these experts modules be seen and kept from now on (idempotent)."""
    for path in experts_paths:
        experts, block = model.get_submodule(path), model.get_submodule(name_of(path).rpartition(".")[0])
        known = vars(block).get(_EXPERTS, ())
        if any(experts is other for other in known):
            continue
        setattr(block, _EXPERTS, (*known, experts))
        experts.register_forward_pre_hook(_leave_at_experts, with_kwargs=True)
        if not known:
            block.register_forward_pre_hook(_enter)
            block.register_forward_hook(_leave, always_call=True)


_RUNNING: list[_Selecting] = []  # the blocks that are running, outermost first


def _enter(block: nn.Module, args: tuple) -> None:
    if torch.compiler.is_compiling():  # a graph decides itself what is computed again; contexts run layers eagerly
        return
    experts = vars(block)[_EXPERTS]
    watchers = [(watcher, name) for watcher in WATCHERS for one in experts if (name := watcher.names(one)) is not None]
    if not watchers and not checkpointing.keeps_selections():
        return
    if watchers and len(experts) > 1:
        raise ValueError(
            f"{type(block).__name__} has {len(experts)} experts modules ({', '.join(name for _, name in watchers)}): "
            "which one a selection is for is not known, so it cannot be recorded or replayed."
        )
    running = _Selecting(block, experts, watchers)
    running.__enter__()
    _RUNNING.append(running)


def _leave_at_experts(experts: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    if not _RUNNING or not any(experts is one for one in _RUNNING[-1].experts):
        return
    running = _RUNNING[-1]
    running.stop()
    if running.watchers and not checkpointing.is_selection_replay():
        index = routing_index(type(experts).__name__, (*args, *kwargs.values()))
        for watcher, name in running.watchers:
            watcher.given(name, running.selected, running.num_replaced, index)


def _leave(block: nn.Module, args: object, output: object) -> None:
    if torch.compiler.is_compiling():
        return
    while any(running.block is block for running in _RUNNING):  # inner blocks that ended in an error are still there
        _RUNNING.pop().stop()


class _Selecting(TorchFunctionMode):
    """Takes the `topk` calls of a running block."""

    def __init__(self, block: nn.Module, experts: tuple[nn.Module, ...], watchers: list[tuple[Watcher, str]]) -> None:
        super().__init__()
        self.block, self.experts, self.watchers = block, experts, watchers
        self.num_experts = min(num_experts_of(one) for one in experts)
        self.selected: Tensor | None = None
        self.num_replaced = 0
        self._is_running = True

    def stop(self) -> None:
        if self._is_running:
            self._is_running = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk and func is not Tensor.topk:
            return func(*args, **kwargs)
        return self._topk(func, *args, **kwargs)

    def _topk(self, func: Callable, input: Tensor, k: int, dim: int = -1, *flags: bool, **options: Any) -> Any:
        scores, options = input, options | dict(zip(("largest", "sorted"), flags, strict=False))
        if dim not in (-1, scores.ndim - 1) or options.get("out") is not None or not options.get("largest", True):
            return func(scores, k, dim, **options)

        def select(by: Tensor) -> Tensor:
            return func(by, k, dim, **options)[1].to(index_dtype(scores.shape[-1]))

        index = checkpointing.remember_selection(lambda: self._select(scores.detach(), k, select)).long()
        return torch.return_types.topk((scores.gather(-1, index), index))

    def _select(self, scores: Tensor, k: int, select: Callable[[Tensor], Tensor]) -> Tensor:
        """The indices of a `topk` over the last dimension of `scores`, in the dtype of `index_dtype`."""
        num_classes = scores.shape[-1]
        if num_classes < self.num_experts:
            return self._select_groups(scores, select)
        index = select(scores)
        wanted_TK = self._wanted(scores)
        if wanted_TK is not None and wanted_TK.shape[1] == k:
            wanted = wanted_TK.view(index.shape)
            # What is no class of this router stays its own, unnoticed by the host: the watcher compares.
            is_class = (wanted >= 0) & (wanted < num_classes)
            index = torch.where(is_class, wanted.to(index.dtype), index)
            self.num_replaced += 1
        self.selected = index.reshape(-1, k)
        return index

    def _select_groups(self, scores: Tensor, select: Callable[[Tensor], Tensor]) -> Tensor:
        """Groups of neighbouring experts `(T, G)` to choose from: first those that have a wanted expert, since some routers take
        the weights from scores without the other groups."""
        wanted_TK = self._wanted(scores) if scores.ndim == 2 else None
        if wanted_TK is None or self.num_experts % scores.shape[-1]:
            return select(scores)
        group_TK = wanted_TK.long() // (self.num_experts // scores.shape[-1])
        has_wanted_TG = torch.zeros_like(scores, dtype=torch.bool)
        # Classes beyond the experts are in no group; tokens without a wish have a column of their own.
        column_TK = torch.where((group_TK >= 0) & (group_TK < scores.shape[-1]), group_TK, scores.shape[-1])
        has_wanted_TG = nn.functional.pad(has_wanted_TG, (0, 1)).scatter(1, column_TK, True)[:, :-1]
        return select(scores.masked_fill(has_wanted_TG, float("inf")))

    def _wanted(self, scores: Tensor) -> Tensor | None:
        num_tokens = scores.numel() // scores.shape[-1]
        asked = (watcher.wanted(name, num_tokens, scores.device) for watcher, name in self.watchers)
        return next((wanted for wanted in asked if wanted is not None), None)
