"""Forwards that draw random numbers made comparable: no dropout, and constants in place of what torch's functions draw.

with fixed_draws():
    full = model(input_ids=ids)      # the second call draws what the first drew, for other shapes too
    sliced = model(input_ids=part)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip
UNIFORM, NORMAL, KEPT = 0.5, 0.5, 1.0
"""The constants: the middle of an interval, half a standard deviation above the mean, and a decision to keep."""
DROPOUT_P_INDEX = 4
"""The place of this argument of torch's attention."""
FIXED_VALUES: dict[Callable[..., Any], float] = {
    torch.rand: UNIFORM, torch.rand_like: UNIFORM, torch.randn: NORMAL, torch.randn_like: NORMAL,
    torch.bernoulli: KEPT, Tensor.bernoulli: KEPT, Tensor.bernoulli_: KEPT,
}  # fmt: skip


class _FixedDraws(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > DROPOUT_P_INDEX:
                args = (*args[:DROPOUT_P_INDEX], 0.0, *args[DROPOUT_P_INDEX + 1 :])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
            return func(*args, **kwargs)
        if func is Tensor.uniform_:
            low, high = _two_arguments(args, kwargs, ("from", "to"), (0.0, 1.0))
            return args[0].fill_(low + UNIFORM * (high - low))
        if func is Tensor.normal_:
            mean, deviation = _two_arguments(args, kwargs, ("mean", "std"), (0.0, 1.0))
            return args[0].fill_(mean + NORMAL * deviation)
        if func not in FIXED_VALUES:
            return func(*args, **kwargs)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            drawn = func(*args, **kwargs)
        with torch.no_grad():
            return drawn.fill_(FIXED_VALUES[func])


def _two_arguments(
    args: tuple, kwargs: dict[str, Any], names: tuple[str, str], defaults: tuple[float, float]
) -> tuple[float, float]:
    """Two numbers after the tensor, by position or name."""
    first, second = (
        args[place] if len(args) > place else kwargs.get(name, default)
        for place, name, default in zip((1, 2), names, defaults, strict=True)
    )
    return first, second


@contextlib.contextmanager
def fixed_draws() -> Iterator[None]:
    """Dropout changes nothing in the block, and random tensors are constant. Samples of other functions stay random."""
    with _FixedDraws(), torch.compiler.set_stance("force_eager"):
        yield
