"""Differences of tensors and of training steps: what equal means, and the algebra of the worst."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from patchgen.runtime.verify.comparison import (
    DIFFERENT_FORM,
    EQUAL,
    GRADIENT_FLOOR,
    Difference,
    Step,
    compare_gradients,
    difference,
    floating_tensors,
    name_of_worst,
    worst_of,
)
from patchgen.runtime.verify.training_checks import Check

NUMBERS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8)
DIFFERENCES = st.builds(Difference, st.booleans(), st.floats(0, 1e9), st.floats(0, 1e9))


@given(NUMBERS, NUMBERS)
def test_equal_is_bit_for_bit(one, other):
    a, b = torch.tensor(one), torch.tensor(other)
    assert difference(a, b).is_equal == (a.shape == b.shape and torch.equal(a, b))
    assert difference(a, a.clone()) == EQUAL


@given(NUMBERS, st.floats(0.25, 4.0))
def test_a_scaled_tensor_is_as_far_as_its_scale(numbers, scale):
    reference = torch.tensor(numbers, dtype=torch.float64)
    if not reference.norm() > 1e-3:
        return
    assert abs(difference(reference * scale, reference).relative - abs(scale - 1)) < 1e-9


@given(DIFFERENCES, DIFFERENCES, DIFFERENCES)
def test_worst_is_a_join(a, b, c):
    assert a.worst(b) == b.worst(a)
    assert a.worst(b).worst(c) == a.worst(b.worst(c))
    assert a.worst(a) == a
    assert EQUAL.worst(a) == a or a == Difference(True, a.absolute, a.relative)


def test_a_tensor_on_one_side_only_or_of_another_shape_or_dtype_is_infinitely_far():
    tensor = torch.ones(2)
    assert difference(None, tensor) == difference(tensor, None) == DIFFERENT_FORM
    assert difference(tensor, torch.ones(1, 2)) == DIFFERENT_FORM
    assert difference(tensor, tensor.double()) == DIFFERENT_FORM
    assert difference(None, None) == EQUAL


def test_a_gradient_below_the_floor_is_measured_against_it():
    expected = Step({}, {"large": torch.tensor([1.0]), "rounding": torch.tensor([1e-12])})
    actual = Step({}, {"large": torch.tensor([1.0]), "rounding": torch.tensor([-1e-12])})
    found = compare_gradients(actual, expected)["rounding"]
    assert not found.is_equal
    assert abs(found.relative - 2e-12 / GRADIENT_FLOOR) < 1e-12


def test_nan_is_never_equal():
    nan = torch.tensor([float("nan")])
    assert not difference(nan, nan.clone()).is_equal


def test_nan_is_the_worst_wherever_it_stands():
    nan = difference(torch.tensor([float("nan")]), torch.tensor([1.0]))
    far = Difference(False, 2.0, 2.0)
    for order in ((far, nan), (nan, far), (EQUAL, nan, far)):
        assert math.isnan(worst_of(order).relative) and math.isnan(worst_of(order).absolute)
        assert math.isnan(Check("packed", far, EQUAL, worst_of(order)).worst)
        assert name_of_worst(dict(zip("abc", order, strict=False))) == "abc"[order.index(nan)]
    assert worst_of([EQUAL, far]) == far


def test_an_infinite_gradient_hides_no_difference_of_another():
    expected = Step({}, {"infinite": torch.tensor([math.inf]), "other": torch.tensor([1.0])})
    actual = Step({}, {"infinite": torch.tensor([math.inf]), "other": torch.tensor([2.0])})
    assert compare_gradients(actual, expected)["other"].relative == 1.0


def test_tensors_are_found_in_nested_outputs():
    found = floating_tensors(
        {"loss": torch.tensor(1.0), "router_logits": (torch.ones(2), torch.ones(3)), "ids": torch.tensor(1)}
    )
    assert [path for path, _ in found] == ["loss", "router_logits.0", "router_logits.1"]


def test_parameters_without_gradient_are_those_without_or_with_zero_gradient():
    step = Step({}, {"live": torch.ones(1), "zero": torch.zeros(1), "none": None})
    assert step.parameters_without_gradient() == ["zero", "none"]


def test_what_no_figure_measures_is_told_apart():
    tensor, infinite = torch.ones(2), torch.tensor([1.0, float("inf")])
    assert "one side only" in difference(None, tensor).not_measurable
    for other in (infinite, torch.tensor([1.0, float("nan")])):
        assert "infinities or NaNs" in difference(tensor, other).not_measurable
        assert "infinities or NaNs" in difference(other, tensor).not_measurable
    assert difference(tensor, tensor + 1).not_measurable == EQUAL.not_measurable == ""
