"""How far rounding alone moves a step: what upstream's own result moves by when its weights move by their last bit.

A sum that cancels (the gradient of a decay's bias) loses digits in every order of operations. Where a difference is beyond
a fixed bar, it is held against what the model itself makes of the last bit of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from patchgen.runtime.verify.comparison import GRADIENT_FLOOR, Step

ROUNDING = 8.0
SHAKES = 3
WELL_CONDITIONED = 1e-3
"""Where upstream moves by more than this share, discrete choices (routing) fell out otherwise: it excuses nothing."""


Result = TypeVar("Result")


def shaken_step(model: nn.Module, reference: Callable[[nn.Module], Result], seed: int) -> Result:
    """What `reference` makes of upstream's model with every weight off by its last bit."""
    generator = torch.Generator().manual_seed(seed)
    weights = [p.detach() for p in model.parameters() if p.is_floating_point()]
    kept = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            noise = torch.rand(weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + noise.to(weight) * torch.finfo(weight.dtype).eps)
        return reference(model)
    finally:
        for weight, before in zip(weights, kept, strict=True):
            weight.copy_(before)


Gradients = Mapping[str, Tensor]


def relative_difference(got: Tensor | None, expected: Tensor, least: float) -> float:
    """The largest difference, by the largest number that is expected, which is taken for `least` at least; None: zeros."""
    apart = expected if got is None else got - expected
    return float(apart.abs().max() / expected.abs().max().clamp(min=least))


def moved_gradients(
    model: nn.Module, reference: Callable[[nn.Module], tuple[float, Gradients]], expected: Gradients, least: float
) -> dict[str, float]:
    """How far upstream's own gradients move when its weights move by their last bit; 0 where more than rounding did."""
    shaken = [shaken_step(model, reference, seed)[1] for seed in range(SHAKES)]
    moved = {
        name: max(relative_difference(one.get(name), expected[name], least) for one in shaken) for name in expected
    }
    return {name: size if size <= WELL_CONDITIONED else 0.0 for name, size in moved.items()}


def is_rounding(key: str, actual: Step, expected: Step, shaken: Sequence[Step]) -> bool:
    """Whether upstream's own result moves about as far when its weights move by their last bit."""
    pick = _picker(key)
    mine, theirs = pick(actual), pick(expected)
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return False
    others = [one for step in shaken if (one := pick(step)) is not None]  # all of them: it is there in the first
    moved = max((float((one.double() - theirs.double()).norm()) for one in others), default=0.0)
    norm = max(float(theirs.double().norm()), _floor(key, expected))
    last_bit = torch.finfo(theirs.dtype).eps * _floor(key, expected) / GRADIENT_FLOOR  # of the largest gradient
    # All terms of its sum cancel upstream, bit by bit: another order of operations leaves a last bit.
    if not theirs.any():
        return float(mine.double().norm()) <= last_bit
    by_rounding = max(WELL_CONDITIONED * norm, ROUNDING * last_bit)  # a few last bits are no choice
    return moved <= by_rounding and float((mine.double() - theirs.double()).norm()) <= ROUNDING * moved


def _floor(key: str, expected: Step) -> float:
    """What a gradient is at least taken for: one that is zero in exact arithmetic has nothing but rounding."""
    if not key.startswith("gradient of "):
        return 0.0
    norms = [gradient.double().norm().item() for gradient in expected.gradients.values() if gradient is not None]
    return GRADIENT_FLOOR * max(norms, default=0.0)


def _picker(key: str) -> Callable[[Step], Tensor | None]:
    if key.startswith("gradient of "):
        return lambda step: step.gradients.get(key.removeprefix("gradient of "))
    return lambda step: step.outputs.get(key)
