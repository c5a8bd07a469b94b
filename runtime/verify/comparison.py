"""One training step of a model, and the differences between two of them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from patchgen.runtime.verify.inputs import Case

SEED = 1234
GRADIENT_FLOOR = 1e-5
"""Relative differences of gradients are divided by at least this share of the largest gradient norm: below it there is only
rounding (a key bias, for one, has no gradient in exact arithmetic)."""


@dataclass(frozen=True)
class Step:
    """What a training step produced."""

    outputs: Mapping[str, Tensor]
    """Every floating-point tensor of the model's output by its path: "loss", "logits", "aux_loss", ..."""
    gradients: Mapping[str, Tensor | None]
    """The gradient of every parameter, None if the step computed none."""
    changed_inputs: tuple[str, ...] = ()
    """Names of the tensors that the step changed in the batch of its caller."""

    @functools.cached_property
    def max_gradient_norm(self) -> float:
        """The largest finite 2-norm of a gradient: relative to an infinite one, every finite difference would be 0."""
        norms = (gradient.double().norm().item() for gradient in self.gradients.values() if gradient is not None)
        return max(filter(math.isfinite, norms), default=0.0)

    @property
    def not_finite(self) -> str:
        """What is not finite, "loss or logits" or "gradients"; "" if all of these are. Other outputs may hold a mask."""
        results = [self.outputs[name] for name in ("loss", "logits") if name in self.outputs]
        if not all(bool(result.isfinite().all()) for result in results):
            return "loss or logits"
        gradients = (gradient for gradient in self.gradients.values() if gradient is not None)
        return "" if all(bool(gradient.isfinite().all()) for gradient in gradients) else "gradients"

    def parameters_without_gradient(self) -> list[str]:
        """Parameters without a gradient, or with one that is all zeros: this step tests nothing about them."""
        return [name for name, gradient in self.gradients.items() if gradient is None or not gradient.any()]


@dataclass(frozen=True)
class Difference:
    """How far a tensor `a` is from its reference `b`."""

    is_equal: bool
    absolute: float = 0.0
    """max |a - b|"""
    relative: float = 0.0
    """|a - b| / |b|, both in the 2-norm"""
    has_same_form: bool = True
    """False: only one of them exists, or shape or dtype differ."""

    @property
    def not_measurable(self) -> str:
        """Why no figure says how far they are apart; "" if one does."""
        if not self.has_same_form:
            return "it exists on one side only, or its shape or dtype differs"
        return "" if math.isfinite(self.absolute) else "it has infinities or NaNs"

    def worst(self, other: Difference) -> Difference:
        """The worse of both, field by field."""
        return Difference(
            self.is_equal and other.is_equal,
            max(self.absolute, other.absolute, key=nan_is_largest),
            max(self.relative, other.relative, key=nan_is_largest),
            self.has_same_form and other.has_same_form,
        )


def nan_is_largest(figure: float) -> tuple[bool, float]:
    """The key of `max` and `sorted` over differences: Python's own order loses a NaN, depending on its place."""
    return math.isnan(figure), figure


def worst_of(differences: Iterable[Difference]) -> Difference:
    """The worst of all, field by field; `EQUAL` of none."""
    return functools.reduce(Difference.worst, differences, EQUAL)


def name_of_worst(differences: Mapping[str, Difference]) -> str:
    """The name of the one with the largest relative difference."""
    return max(differences, key=lambda name: nan_is_largest(differences[name].relative))


EQUAL = Difference(True)
DIFFERENT_FORM = Difference(False, math.inf, math.inf, has_same_form=False)


def train_step(model: nn.Module, case: Case, *, training: bool = True) -> Step:
    """Runs forward and backward, in training mode or (`training=False`) in evaluation mode.

    An output without a loss is differentiated through a fixed random projection of its logits, or of all its tensors.
    """
    model.train(training)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    batch = copy.deepcopy(dict(case.batch))
    output = model(**batch, use_cache=False)
    outputs = dict(floating_tensors(output))
    loss = outputs["loss"] if "loss" in outputs else _projection(outputs)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    outputs = {name: tensor.detach() for name, tensor in outputs.items()}
    return Step(outputs, gradients, changed_inputs(batch, case.batch))


def changed_inputs(batch: Mapping[str, object], original: Mapping[str, object]) -> tuple[str, ...]:
    """The names of the tensors of a batch that are no longer what they were."""
    return tuple(
        name
        for name, tensor in original.items()
        if isinstance(tensor, Tensor) and not (isinstance(now := batch[name], Tensor) and torch.equal(now, tensor))
    )


def floating_tensors(value: object, path: str = "") -> list[tuple[str, Tensor]]:
    """The floating-point tensors in nested mappings and sequences, with their paths ("router_logits.0")."""
    if isinstance(value, Tensor):
        return [(path, value)] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return []
    return [pair for key, item in items for pair in floating_tensors(item, f"{path}.{key}" if path else str(key))]


def difference(actual: Tensor | None, expected: Tensor | None, *, floor: float = 0.0) -> Difference:
    """The difference of two tensors; infinite if only one exists, or if shape or dtype differ.

    Tensors that are not equal and hold an infinity or a NaN differ by an infinity or a NaN. `relative` is infinite as well
    where the norm to divide by is 0.

    Args:
        floor: the smallest norm that the relative difference is divided by.
    """
    if actual is None and expected is None:
        return EQUAL
    if actual is None or expected is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return DIFFERENT_FORM
    if torch.equal(actual, expected):
        return EQUAL
    distance = actual.double() - expected.double()
    scale = max(expected.double().norm().item(), floor)
    relative = distance.norm().item() / scale if scale else math.inf
    return Difference(False, distance.abs().max().item(), relative)


def compare_outputs(actual: Step, expected: Step) -> dict[str, Difference]:
    """The difference of each output that either step has."""
    names = dict.fromkeys([*expected.outputs, *actual.outputs])
    return {name: difference(actual.outputs.get(name), expected.outputs.get(name)) for name in names}


def compare_gradients(actual: Step, expected: Step) -> dict[str, Difference]:
    """The difference of each parameter's gradient."""
    floor = GRADIENT_FLOOR * expected.max_gradient_norm
    names = dict.fromkeys([*expected.gradients, *actual.gradients])
    return {name: difference(actual.gradients.get(name), expected.gradients.get(name), floor=floor) for name in names}


def _projection(outputs: Mapping[str, Tensor]) -> Tensor:
    if not outputs:
        raise ValueError("The model's output has no floating-point tensor: there is nothing to differentiate.")
    generator = torch.Generator().manual_seed(SEED)
    projected = (
        [outputs["logits"]] if "logits" in outputs else [output for output in outputs.values() if output.requires_grad]
    )
    weights = [torch.randn(output.shape, generator=generator).to(output.device) for output in projected]
    parts = [(output * weight).mean() for output, weight in zip(projected, weights, strict=True)]
    return functools.reduce(torch.add, parts)
