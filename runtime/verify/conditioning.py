"""How far rounding alone moves a step: what upstream's own result moves by when its weights are perturbed by eps.

A sum that cancels (the gradient of a decay's bias) loses digits in every order of operations. A difference beyond a fixed
tolerance is therefore compared with the model's own sensitivity to a rounding error in its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from patchgen.runtime.verify.comparison import GRADIENT_FLOOR, Difference, Step, max_gradient_norm

ROUNDING_FACTOR = 8.0
"""How many times further than a perturbed step a compared step may be."""
NUM_PERTURBATIONS = 3
WELL_CONDITIONED = 1e-3
"""Where upstream moves by more than this share, a discrete choice (routing) came out differently: it excuses nothing."""


Result = TypeVar("Result")
Gradients = Mapping[str, Tensor]


def perturbed_step(model: nn.Module, reference: Callable[[nn.Module], Result], seed: int) -> Result:
    """`reference` of upstream's model with every weight perturbed by up to eps, relative."""
    generator = torch.Generator().manual_seed(seed)
    weights = [p.detach() for p in model.parameters() if p.is_floating_point()]
    originals = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            noise = torch.rand(weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + noise.to(weight) * torch.finfo(weight.dtype).eps)
        return reference(model)
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
    model: nn.Module, reference: Callable[[nn.Module], tuple[float, Gradients]], expected: Gradients, floor: float
) -> dict[str, float]:
    """How far perturbed weights move upstream's own gradients; 0 where that is more than rounding."""
    perturbed = [perturbed_step(model, reference, seed)[1] for seed in range(NUM_PERTURBATIONS)]
    movements = {
        name: max(relative_difference(gradients.get(name), expected[name], floor) for gradients in perturbed)
        for name in expected
    }
    return {name: size if size <= WELL_CONDITIONED else 0.0 for name, size in movements.items()}


def beyond_rounding(
    differences: Mapping[str, Difference],
    actual: Step,
    expected: Step,
    model: nn.Module,
    reference: Callable[[nn.Module], Step],
) -> dict[str, Difference]:
    """The differences that rounding alone does not explain.

    Args:
        differences: by the name of an output, or "gradient of NAME".
        model: upstream's; `reference` computes `expected` from it.
    """
    if not differences:
        return {}
    perturbed = [perturbed_step(model, reference, seed) for seed in range(NUM_PERTURBATIONS)]
    return {key: value for key, value in differences.items() if not is_rounding(key, actual, expected, perturbed)}


def is_rounding(key: str, actual: Step, expected: Step, perturbed: Sequence[Step]) -> bool:
    """Whether upstream's own result moves about as far when its weights are perturbed."""
    pick = _picker(key)
    result, reference = pick(actual), pick(expected)
    if result is None or reference is None or result.shape != reference.shape:
        return False
    tensors = [tensor for step in perturbed if (tensor := pick(step)) is not None]
    movement = max((float((tensor.double() - reference.double()).norm()) for tensor in tensors), default=0.0)
    largest = max_gradient_norm(expected) if key.startswith("gradient of ") else 0.0
    norm = max(float(reference.double().norm()), GRADIENT_FLOOR * largest)
    rounding_error = torch.finfo(reference.dtype).eps * largest
    if (
        not reference.any()
    ):  # all terms of its sum cancel upstream; another order of operations leaves a rounding error
        return float(result.double().norm()) <= rounding_error
    limit = max(WELL_CONDITIONED * norm, ROUNDING_FACTOR * rounding_error)  # a few rounding errors are no choice
    return movement <= limit and float((result.double() - reference.double()).norm()) <= ROUNDING_FACTOR * movement


def _picker(key: str) -> Callable[[Step], Tensor | None]:
    if key.startswith("gradient of "):
        return lambda step: step.gradients.get(key.removeprefix("gradient of "))
    return lambda step: step.outputs.get(key)
