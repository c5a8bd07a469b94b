"""How far rounding alone moves a step: what upstream's own result moves by when its weights are perturbed by eps.

A sum that cancels (the gradient of a decay's bias) loses digits in every order of operations. A difference beyond a fixed
tolerance is therefore compared with the model's own sensitivity to a rounding error in its weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from patchgen.runtime.verify.comparison import GRADIENT_FLOOR, Difference, Step, nan_is_largest

ROUNDING_FACTOR = 8.0
"""How many times further than a perturbed step a compared step may be."""
NUM_PERTURBATIONS = 3
NOISE_SPREAD = 64.0
"""How many times further than another perturbed step one may move a result that is nothing but rounding."""
MAX_MOVEMENT = 1e-3
"""Where upstream moves by more than this share, a discrete choice (routing) came out differently: it excuses nothing."""


Result = TypeVar("Result")
Gradients = Mapping[str, Tensor]


def perturbed_step(model: nn.Module, reference_step: Callable[[nn.Module], Result], seed: int) -> Result:
    """`reference_step` of upstream's model, computed with every weight perturbed by up to eps, relative."""
    generator = torch.Generator().manual_seed(seed)
    weights = [p.detach() for p in model.parameters() if p.is_floating_point()]
    originals = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            noise = torch.rand(weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + noise.to(weight) * torch.finfo(weight.dtype).eps)
        return reference_step(model)
    finally:
        for weight, original in zip(weights, originals, strict=True):
            weight.copy_(original)


def relative_difference(actual: Tensor | None, expected: Tensor, floor: float) -> float:
    """The largest absolute difference over the largest absolute expected value, or over `floor` if that is larger.

    None counts as zeros.
    """
    deviation = expected if actual is None else actual - expected
    return float(deviation.abs().max() / expected.abs().max().clamp(min=floor))


def gradient_sensitivity(
    model: nn.Module, reference_step: Callable[[nn.Module], tuple[float, Gradients]], expected: Gradients, floor: float
) -> dict[str, float]:
    """How far perturbed weights move upstream's own gradients; 0 where that is more than rounding."""
    perturbed = [perturbed_step(model, reference_step, seed)[1] for seed in range(NUM_PERTURBATIONS)]
    movements = {
        name: max(
            (relative_difference(gradients.get(name), expected[name], floor) for gradients in perturbed),
            key=nan_is_largest,
        )
        for name in expected
    }
    return {name: size if size <= MAX_MOVEMENT else 0.0 for name, size in movements.items()}


def beyond_rounding(
    differences: Mapping[str, Difference],
    actual: Step,
    expected: Step,
    model: nn.Module,
    reference_step: Callable[[nn.Module], Step],
) -> dict[str, Difference]:
    """The differences that rounding alone does not explain.

    Args:
        differences: by the name of an output, or "gradient of NAME".
        model: upstream's; `reference_step` computes `expected` from it.
    """
    maybe_rounding = [
        key
        for key in differences
        if _distance(key, actual, expected) <= ROUNDING_FACTOR * _largest_movement(key, expected)
    ]
    if not maybe_rounding:
        return dict(differences)
    perturbed = [perturbed_step(model, reference_step, seed) for seed in range(NUM_PERTURBATIONS)]
    explained = {key for key in maybe_rounding if is_rounding(key, actual, expected, perturbed)}
    return {key: value for key, value in differences.items() if key not in explained}


def is_rounding(key: str, actual: Step, expected: Step, perturbed: Sequence[Step]) -> bool:
    """Whether upstream's own result moves about as far when its weights are perturbed."""
    distance, reference = _distance(key, actual, expected), _result_getter(key)(expected)
    if reference is not None and not reference.any():
        # All terms of its sum cancel upstream; another order of operations leaves a rounding error.
        return distance <= _rounding_error(key, expected)
    if reference is not None and distance <= min(
        _rounding_error(key, expected), MAX_MOVEMENT * float(reference.norm())
    ):
        # Of a sum that nearly cancels (a scalar's gradient) a few perturbations may move less than another order does.
        return True
    movements = [_distance(key, step, expected) for step in perturbed if _result_getter(key)(step) is not None]
    movement, limit = max(movements, default=0.0, key=nan_is_largest), _largest_movement(key, expected)
    allowed = ROUNDING_FACTOR * movement
    if limit > MAX_MOVEMENT * _norm(key, expected) and movement > NOISE_SPREAD * min(movements, default=0.0):
        # Noise moves whenever weights do, but for the last bit of a sum; more is a discrete choice, as small as noise.
        allowed = min(allowed, _rounding_error(key, expected))
    return movement <= limit and distance <= allowed


def _distance(key: str, actual: Step, expected: Step) -> float:
    """The 2-norm of the difference; infinite if only one step has a result, or one of another shape."""
    result, reference = _result_getter(key)(actual), _result_getter(key)(expected)
    if result is None or reference is None or result.shape != reference.shape:
        return math.inf
    return float((result.double() - reference.double()).norm())


def _largest_movement(key: str, expected: Step) -> float:
    """How far rounding may move a result upstream; further is a discrete choice. Nowhere, if it is not finite.

    A gradient may be zero but for rounding (of a bias that a softmax over positions cancels): what is left has no relation
    to its own norm, but to the gradients that it is summed from.
    """
    norm = _norm(key, expected)
    return max(MAX_MOVEMENT * norm, ROUNDING_FACTOR * _rounding_error(key, expected)) if math.isfinite(norm) else 0.0


def _norm(key: str, expected: Step) -> float:
    """The 2-norm of a result upstream, that of a gradient at least a small part of the largest."""
    reference = _result_getter(key)(expected)
    norm = 0.0 if reference is None else float(reference.double().norm())
    return max(norm, GRADIENT_FLOOR * expected.max_gradient_norm) if key.startswith("gradient of ") else norm


def _rounding_error(key: str, expected: Step) -> float:
    """One rounding error of the largest gradient; outputs have none, their norm is their scale."""
    reference = _result_getter(key)(expected)
    if reference is None or not key.startswith("gradient of "):
        return 0.0
    return torch.finfo(reference.dtype).eps * expected.max_gradient_norm


def _result_getter(key: str) -> Callable[[Step], Tensor | None]:
    if key.startswith("gradient of "):
        return lambda step: step.gradients.get(key.removeprefix("gradient of "))
    return lambda step: step.outputs.get(key)
