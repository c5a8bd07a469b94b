"""The decoder's layers on slices of a sequence, compared one by one with those on the full sequence; see `selfcheck.py`.

S tokens of the full sequence   s = S / n of this rank   H hidden size
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.runtime.parallel.state import ParallelState

CHANGE_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Of the largest change that a layer makes to its input, or of the largest output of a module inside a layer."""
HALF_PRECISION_CHANGE_TOLERANCE = 5e-2
ROUNDING = 8
"""Rounding errors (eps) of the largest hidden state that are allowed in addition: a layer's sum with its input is rounded."""


_Seen = Callable[[str, Tensor | None], None]


@dataclass
class _Value:
    """A hidden state of the full sequence: this rank's slice `(1, s, H)`, and what differences are measured by."""

    local: Tensor
    size: Tensor
    change: Tensor


class Layers:
    """The hidden states of the decoder's layers, and of the modules directly inside them.

    Attributes:
        worst: the largest difference on this rank, in units of what is allowed; above 1 it is not rounding.
        first: the first module on this rank whose difference is not rounding.
    """

    def __init__(self, model: nn.Module, state: ParallelState) -> None:
        self.worst, self.first = 0.0, ""
        self._state = state
        self._layers, self._parts = _layers_and_parts(model)
        self._dtypes: set[torch.dtype] = set()
        self._inputs: dict[str, list[_Value | None]] = defaultdict(list)
        self._outputs: dict[str, list[_Value | None]] = defaultdict(list)

    @contextlib.contextmanager
    def recorded(self, length: int) -> Iterator[None]:
        """Records the calls in the block, which computes the full sequence."""
        running: list[Tensor | None] = []
        last_input: list[Tensor] = []

        def before(path: str, hidden: Tensor | None) -> None:
            full = _row(hidden, length)
            running.append(full.clone() if full is not None else None)
            change = full - last_input[-1] if full is not None and last_input else full
            self._inputs[path].append(self._value(full, change))
            if full is not None:
                last_input[:] = [full.clone()]

        def after(path: str, hidden: Tensor | None) -> None:
            full, hidden_before = _row(hidden, length), running.pop()
            change = None
            if full is not None and hidden_before is not None and full.shape == hidden_before.shape:
                change = full - hidden_before
            self._outputs[path].append(self._value(full, change))

        def part(path: str, hidden: Tensor | None) -> None:
            full = _row(hidden, length)
            self._outputs[path].append(self._value(full, full))

        with self._hooked(before, after, part):
            yield

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """Compares the calls in the block, which computes this rank's slice; layers get the inputs of the recorded calls."""
        inputs = {path: iter(values) for path, values in self._inputs.items()}
        outputs = {path: iter(values) for path, values in self._outputs.items()}

        def before(path: str, hidden: Tensor | None) -> Tensor | None:
            expected = next(inputs.get(path, iter(())), None)
            is_compared = self._compare(f"the input of {path}", hidden, expected)
            return expected.local if is_compared and expected is not None else None

        def after(path: str, hidden: Tensor | None) -> None:
            self._compare(path, hidden, next(outputs.get(path, iter(())), None))

        with self._hooked(before, after, after):
            yield

    def _value(self, hidden: Tensor | None, change: Tensor | None) -> _Value | None:
        """None if there is nothing to compare: calls are counted, so that later ones find theirs."""
        if hidden is None or change is None:
            return None
        is_rounded = hidden.is_cuda and torch.get_float32_matmul_precision() != "highest"  # products in TF32 or bf16
        self._dtypes |= {hidden.dtype, torch.bfloat16} if is_rounded else {hidden.dtype}
        local = hidden.chunk(self._state.sp, dim=1)[self._state.sp_rank].clone()
        return _Value(local, hidden.abs().max().float(), change.abs().max().float())

    def _compare(self, path: str, hidden: Tensor | None, expected: _Value | None) -> bool:
        """Whether the two could be compared."""
        if hidden is None or expected is None or hidden.shape != expected.local.shape:
            return False
        # A part in fp32 computes on what others have rounded.
        dtype = max(self._dtypes, key=lambda one: torch.finfo(one).eps)
        tolerance = CHANGE_TOLERANCE.get(dtype, HALF_PRECISION_CHANGE_TOLERANCE)
        by_token = (hidden - expected.local).float().abs().amax(dim=-1).flatten()
        # In half precision a token near a tie of its router may get another expert; most tokens do not.
        deviation = by_token.max() if dtype in CHANGE_TOLERANCE else by_token.median()
        allowed = tolerance * expected.change + ROUNDING * torch.finfo(dtype).eps * expected.size
        ratio = float((deviation / allowed.clamp(min=1e-30)).nan_to_num(nan=float("inf")))
        self.worst = max(self.worst, ratio)
        if ratio > 1 and not self.first:
            self.first = path
        return True

    @contextlib.contextmanager
    def _hooked(
        self, before: Callable[[str, Tensor | None], Tensor | None], after: _Seen, part: _Seen
    ) -> Iterator[None]:
        """Calls `before` with a layer's input, which its result replaces, and the others with outputs of layers and parts."""
        with contextlib.ExitStack() as hooks:
            for path, layer in self._layers:
                name = next(iter(inspect.signature(layer.forward).parameters), "")

                def enter(_, args, kwargs, path=path, name=name):
                    replaced = before(path, _tensor(args[0] if args else kwargs.get(name)))
                    if replaced is None:
                        return None
                    return ((replaced, *args[1:]), kwargs) if args else (args, kwargs | {name: replaced})

                def leave(_, __, output, path=path):
                    after(path, _tensor(output))

                hooks.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(layer.register_forward_hook(leave).remove)
                # A compiled call would keep the hooks.
                hooks.callback(setattr, layer, "_compiled_call_impl", layer._compiled_call_impl)
                layer._compiled_call_impl = None
            for path, module in self._parts:

                def output_of(_, __, output, path=path):
                    part(path, _tensor(output))

                hooks.callback(module.register_forward_hook(output_of).remove)
            yield


def _layers_and_parts(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """The elements of the decoder's outermost module lists, and their children, by path."""
    decoder: Any = getattr(model, "get_decoder", lambda: model)()
    modules = set(decoder.modules())
    layers: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_inner = any(path.startswith(f"{outer}.") for outer in layers)
        if isinstance(module, nn.ModuleList) and module in modules and not is_inner:
            layers |= {f"{path}.{index}": layer for index, layer in enumerate(module)}
    parts = [(f"{path}.{name}", part) for path, layer in layers.items() for name, part in layer.named_children()]
    return list(layers.items()), parts


def _row(hidden: Tensor | None, length: int) -> Tensor | None:
    """The tensor, if it is one row of so many tokens, `(1, length, H)`."""
    if hidden is not None and hidden.is_floating_point() and hidden.ndim == 3 and hidden.shape[:2] == (1, length):
        return hidden
    return None


def _tensor(value: Any) -> Tensor | None:
    value = value[0] if isinstance(value, tuple | list) and value else value
    return value if isinstance(value, Tensor) else None
