"""The kernel's sum of squares against torch's in float64: sizes around a block, several tensors, values that are not finite."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from patchgen.kernels.optimizer.squares import partial_sums, sum_of_squares
from patchgen.runtime.parallel import gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(1,), (2048,), (2047, 3), (0,), (3, 4, 2731), (8193,)]
    return [torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_float64(dtype):
    given = tensors(dtype)
    expected = sum(float(tensor.double().square().sum()) for tensor in given)
    # A thousand additions one after the other at most, each rounded: their errors are of both signs.
    assert abs(float(sum_of_squares(given)) / expected - 1) < 32 * torch.finfo(torch.float32).eps
    assert torch.equal(sum_of_squares(given), sum_of_squares(given))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_kept(bad):
    given = tensors(torch.float32)
    given[-1][-1] = bad
    assert not torch.isfinite(sum_of_squares(given))


def test_strided_tensors_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        sum_of_squares([torch.zeros(4, 4, device=DEVICE).t()])


def test_the_norm_of_gradients_is_the_same_through_the_kernel(monkeypatch):
    """Large and small gradients, one of them strided, of two dtypes."""
    parameters = [
        torch.nn.Parameter(torch.zeros(size, device=DEVICE)) for size in ((300, 7), (5,), (64, 80), (40, 50))
    ]
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE)
    parameters[2].grad = torch.randn(80, 64, generator=generator).to(DEVICE).t()
    expected = torch.cat([parameter.grad.flatten() for parameter in parameters]).double().norm()
    monkeypatch.setattr(gradients, "LARGE", 1000)
    monkeypatch.setattr(gradients, "_has_kernel", lambda gradient: True)
    found = []
    monkeypatch.setattr(gradients, "_squares_by_kernel", lambda large: found.append(len(large)) or partial_sums(large))
    assert abs(float(gradients.norm(parameters)) / float(expected) - 1) < 32 * torch.finfo(torch.float32).eps
    assert found == [2]  # the strided one and the small one are torch's
    assert_parts_tell_which_gradient_is_not_finite(parameters)


def assert_parts_tell_which_gradient_is_not_finite(parameters: list[torch.nn.Parameter]) -> None:
    """Of large ones and of torch's, also when the gradients are gone."""
    model = torch.nn.ParameterList(parameters)
    for index, parameter in enumerate(parameters):
        parts: gradients.Parts = []
        kept, parameter.grad = parameter.grad, torch.full_like(parameter.grad, float("nan"))
        assert not torch.isfinite(gradients.clip(model, 1.0, parts=parts))
        gone = [one.grad for one in parameters]
        for one in parameters:
            one.grad = None
        assert gradients.first_nonfinite(model, parts) == str(index)
        for one, gradient in zip(parameters, gone, strict=True):
            one.grad = gradient
        parameter.grad = kept
        parts = []
        gradients.clip(model, 1.0, parts=parts)
        assert gradients.first_nonfinite(model, parts) is None
