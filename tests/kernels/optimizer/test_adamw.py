"""One step of AdamW against torch's in fp64: parameters, both moments, the copy; clipping in passing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

pytest.importorskip("triton")

from interpreted_fp8 import patch

from patchgen.kernels.moe.fp8_values import Quantised, quantise_weight
from patchgen.kernels.optimizer.adamw import adamw_

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ROUNDING = torch.finfo(torch.float32).eps / 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def state_of(num: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Parameter, gradient and moments of some later step."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(num, generator=generator) for _ in range(4)]
    values[1], values[2], values[3] = values[1].to(dtype), values[2] * 0.1, values[3].square() * 0.01
    return [value.to(DEVICE) for value in values]


def expected_of(parameter, gradient, exp_avg, exp_avg_sq, step: int, factor: float) -> list[torch.Tensor]:
    wide = torch.nn.Parameter(parameter.double())
    wide.grad = gradient.double() * factor
    optimizer = torch.optim.AdamW([wide], **OPTIONS)
    moments = {"exp_avg": exp_avg.double(), "exp_avg_sq": exp_avg_sq.double()}
    optimizer.state[wide] = {"step": torch.tensor(float(step - 1)), **moments}
    optimizer.step()
    return [wide.detach(), moments["exp_avg"], moments["exp_avg_sq"]]


@settings(max_examples=25)
@given(
    num=some.sampled_from([1, 7, 2048, 2049, 5000]),
    dtype=some.sampled_from([torch.float32, torch.bfloat16]),
    step=some.integers(1, 50),
    factor=some.sampled_from([None, 1.0, 0.37]),
    seed=some.integers(0, 99),
)
def test_a_step_is_torchs_to_rounding(num, dtype, step, factor, seed):
    parameter, gradient, exp_avg, exp_avg_sq = state_of(num, dtype, seed)
    expected = expected_of(parameter, gradient, exp_avg, exp_avg_sq, step, factor or 1.0)
    sizes = [value.abs() for value in (parameter, exp_avg, exp_avg_sq)]
    copy = torch.full((num,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    scale = torch.tensor(factor, device=DEVICE) if factor is not None else None
    adamw_(parameter, gradient, exp_avg, exp_avg_sq, step=step, factor=scale, copy=copy, **OPTIONS)
    for name, found, wanted, size in zip(
        ("parameter", "exp_avg", "exp_avg_sq"), (parameter, exp_avg, exp_avg_sq), expected, sizes, strict=True
    ):
        error = (found.double() - wanted).abs()
        # Of at most eight roundings, each of a number no larger than before, after, or the update (lr times at most 3.2).
        bar = (
            8 * ROUNDING * (size.double() + wanted.abs() + (0.04 if name == "parameter" else gradient.abs().double()))
        )
        assert bool((error <= bar).all()), f"{name}: {float((error / bar).max()):.2f} times the bar"
    if DEVICE == "cuda":
        assert torch.equal(copy, parameter.bfloat16())
    else:  # the interpreter rounds in its own way
        assert bool(((copy.float() - parameter).abs() <= 2**-7 * parameter.abs() + 1e-30).all())


@pytest.mark.parametrize("shape", [(2, 3, 48), (1, 5, 1040), (3, 2, 16)])
def test_rows_in_fp8_are_those_of_the_copy_and_all_else_is_as_without(shape, monkeypatch):
    if DEVICE == "cpu":
        patch(monkeypatch)
    states = [state_of(2 * 3 * 5 * 1040, torch.bfloat16, 3) for _ in range(2)]
    num = math.prod(shape)
    found, expected = ([value[:num].view(shape).contiguous() for value in state] for state in states)
    for state in (found, expected):
        state[0][0, 0] *= 1e-4
        state[0][-1, -1] *= 1e3
    copies = [torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    rows = Quantised(
        torch.full(shape, float("nan"), device=DEVICE).to(torch.float8_e4m3fn),
        torch.full(shape[:-1], float("nan"), device=DEVICE),
    )
    adamw_(*found, step=4, copy=copies[0], rows=rows, **OPTIONS)
    adamw_(*expected, step=4, copy=copies[1], **OPTIONS)
    for one, other in zip((*found, copies[0]), (*expected, copies[1]), strict=True):
        assert torch.equal(one, other)
    wanted = quantise_weight(copies[0])
    assert torch.equal(rows.scales, wanted.scales)
    assert torch.equal(rows.values.view(torch.uint8), wanted.values.view(torch.uint8))


def test_rows_without_a_copy_are_refused():
    rows = Quantised(torch.empty(1, 1, 16, dtype=torch.float8_e4m3fn, device=DEVICE), torch.empty(1, 1, device=DEVICE))
    with pytest.raises(ValueError, match="no copy"):
        adamw_(*(value.view(1, 1, 16) for value in state_of(16, torch.float32, 0)), step=1, rows=rows, **OPTIONS)


def test_tensors_with_gaps_are_refused():
    parameter, gradient, exp_avg, exp_avg_sq = (value.view(2, 8) for value in state_of(16, torch.float32, 0))
    with pytest.raises(
        ValueError, match=r"contiguous tensors of one size, found \(2, 8\) with strides \(8, 1\), \(8, 2\)"
    ):
        adamw_(parameter, gradient.t(), exp_avg, exp_avg_sq, step=1, **OPTIONS)


@pytest.mark.gpu
def test_no_further_from_fp64_than_torchs_fused_one():
    parameter, gradient, exp_avg, exp_avg_sq = state_of(1_000_003, torch.bfloat16, 0)
    expected, _, _ = expected_of(parameter, gradient, exp_avg, exp_avg_sq, 5, 0.3)
    fused = torch.nn.Parameter(parameter.clone())
    fused.grad = gradient.float() * 0.3
    optimizer = torch.optim.AdamW([fused], fused=True, **OPTIONS)
    moments = {"exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
    optimizer.state[fused] = {"step": torch.tensor(4.0, device="cuda"), **moments}
    optimizer.step()
    factor = torch.tensor(0.3, device="cuda")
    adamw_(parameter, gradient, exp_avg, exp_avg_sq, step=5, factor=factor, **OPTIONS)
    theirs = (fused.detach().double() - expected).norm()
    assert (parameter.double() - expected).norm() <= 1.5 * theirs


@pytest.mark.parametrize("with_copy", [False, True])
def test_a_step_that_the_device_does_not_take_changes_nothing(with_copy):
    """Whatever its gradient; one that it takes has the bits of a step without the question."""
    before = state_of(3000, torch.bfloat16, seed=3)
    found, expected = [value.clone() for value in before], [value.clone() for value in before]
    found[1].fill_(float("nan"))
    copy = torch.zeros(3000, dtype=torch.bfloat16, device=DEVICE) if with_copy else None
    factor = torch.tensor(float("nan"), device=DEVICE)
    adamw_(*found, step=5, factor=factor, taken=torch.tensor(False, device=DEVICE), copy=copy, **OPTIONS)
    for index in (0, 2, 3):
        assert torch.equal(found[index], before[index])
    if copy is not None:
        assert (copy.float() - before[0]).abs().max() <= torch.finfo(torch.bfloat16).eps * before[0].abs().max()
    found = [value.clone() for value in before]
    adamw_(*found, step=5, taken=torch.tensor(True, device=DEVICE), **OPTIONS)
    adamw_(*expected, step=5, **OPTIONS)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
