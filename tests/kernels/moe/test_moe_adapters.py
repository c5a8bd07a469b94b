"""Adapters of experts in each backend: against the merged weights in fp64, and against the reference at their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from moe_cases import CASES, Case, run
from rounding import require_as_exact, require_equal_up_to_rounding

from patchgen.kernels.fused_moe import fused_moe
from patchgen.kernels.moe import triton_backend
from patchgen.kernels.moe.adapters import ExpertAdapters, LowRank

on_gpu = torch.cuda.is_available()
SMALL = {"num_tokens": 9, "num_experts": 3, "hidden_size": 24, "intermediate_size": 16}
BOTH = ("gate_up", "down")
INTERPRETED = [  # with the rank, and the weights that have an adapter
    (Case("plain", **SMALL), 72, BOTH),
    (Case("gpt_oss", activation=None, is_transposed=True, is_interleaved=True, has_bias=True, **SMALL), 5, BOTH),
    (Case("no_gate", activation="gelu", is_gated=False, is_transposed=True, **SMALL), 4, ("gate_up",)),
    (Case("left_out", routing="left_out", **SMALL), 3, ("down",)),
    (Case("all_left_out", routing="all_left_out", **SMALL), 3, BOTH),
    (Case("several_tiles", **(SMALL | {"num_tokens": 150, "num_experts": 2})), 8, BOTH),
]
FACTORS = ("gate_up_left", "gate_up_right", "down_left", "down_right")
COMMON = ("out", "d_hidden_states", "d_top_k_weights")


def factors_of(case: Case, rank: int, dtype: torch.dtype, which: tuple[str, ...] = BOTH) -> dict:
    """Random factors beside the weights of a case, by name."""
    generator, weights = torch.Generator().manual_seed(5), case.tensors(torch.float64)
    found = {}
    for name in which:
        num_experts, rows, columns = weights[f"{name}_proj"].shape
        shapes = {"left": (num_experts, rows, rank), "right": (num_experts, rank, columns)}
        for side, shape in shapes.items():
            found[f"{name}_{side}"] = (torch.randn(shape, generator=generator) * shape[2] ** -0.5).to(dtype)
    return found


def run_adapted(case: Case, tensors: dict, factors: dict, backend: str, scale: float = 1.5) -> dict:
    """The output and the gradients of tokens, routing weights and factors; the weights are frozen."""
    leaves = {
        name: tensor.detach().clone().requires_grad_(name in ("hidden_states", "top_k_weights", *FACTORS))
        for name, tensor in (tensors | factors).items()
    }
    given = [leaves.pop(name, None) for name in FACTORS]
    adapters = ExpertAdapters(
        *(None if given[place] is None else LowRank(*given[place : place + 2], scale) for place in (0, 2))
    )
    out = fused_moe(**leaves, **case.options(), adapters=adapters, backend=backend)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))
    assert leaves["gate_up_proj"].grad is None and leaves["down_proj"].grad is None
    found = {"out": out.detach()} | {f"d_{name}": leaves[name].grad for name in ("hidden_states", "top_k_weights")}
    return found | {f"d_{name}": one.grad for name, one in zip(FACTORS, given, strict=True) if one is not None}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_adapters_are_what_the_merged_weights_compute(case: Case):
    tensors, factors = case.tensors(torch.float64), factors_of(case, 3, torch.float64)
    found = run_adapted(case, tensors, factors, "torch", scale=1.5)
    deltas = {name: 1.5 * factors[f"{name}_left"] @ factors[f"{name}_right"] for name in ("gate_up", "down")}
    merged = run(
        case, tensors | {f"{n}_proj": tensors[f"{n}_proj"] + delta for n, delta in deltas.items()}, "reference"
    )
    for name in COMMON:
        require_equal_up_to_rounding(found[name], merged[name], what=name)
    for name in ("gate_up", "down"):  # by the chain rule, from the gradient of the merged weight
        whole = merged[f"d_{name}_proj"] * 1.5
        require_equal_up_to_rounding(found[f"d_{name}_left"], whole @ factors[f"{name}_right"].mT, what=f"{name} left")
        require_equal_up_to_rounding(
            found[f"d_{name}_right"], factors[f"{name}_left"].mT @ whole, what=f"{name} right"
        )


@pytest.mark.skipif(on_gpu, reason="the kernels take fp32 in the interpreter only")
@pytest.mark.parametrize(("case", "rank", "which"), INTERPRETED, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.sampled(3)
def test_triton_kernels_equal_the_reference_in_the_interpreter(case: Case, rank: int, which: tuple[str, ...]):
    tensors, factors = case.tensors(torch.float32), factors_of(case, rank, torch.float32, which)
    expected, found = (run_adapted(case, tensors, factors, backend) for backend in ("reference", "triton"))
    for name in expected:
        require_equal_up_to_rounding(found[name], expected[name], what=name)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("rank", [4, 72])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_in_bf16_err_no_more_than_the_loop_times_two(case: Case, rank: int, backend: str):
    case = case.at(hidden_size=128, intermediate_size=64)
    tensors, factors = case.tensors(torch.bfloat16, "cuda"), factors_of(case, rank, torch.bfloat16)
    factors = {name: factor.cuda() for name, factor in factors.items()}
    wide = [{n: t.double() if t.is_floating_point() else t for n, t in some.items()} for some in (tensors, factors)]
    exact = run_adapted(case, *wide, "reference")
    loop, found = (run_adapted(case, tensors, factors, name) for name in ("reference", backend))
    for name in exact:
        require_as_exact(found[name], loop[name], exact[name], factor=2.0, what=name)


def test_zeros_in_the_left_factor_change_no_bit():
    case = Case("plain")
    tensors, factors = case.tensors(torch.float32), factors_of(case, 4, torch.float32)
    factors |= {name: torch.zeros_like(factors[name]) for name in ("gate_up_left", "down_left")}
    found = run_adapted(case, tensors, factors, "torch")
    plain = run(case, tensors, "torch")
    for name in COMMON:
        assert torch.equal(found[name], plain[name]), name
    assert found["d_gate_up_left"].any() and not found["d_gate_up_right"].any()


def test_no_tokens_give_zero_gradients_of_the_factors():
    case = Case("empty", num_tokens=0)
    found = run_adapted(case, case.tensors(torch.float32), factors_of(case, 4, torch.float32), "torch")
    assert all(found[f"d_{name}"] is not None and not found[f"d_{name}"].any() for name in FACTORS)


def test_factors_that_do_not_fit_are_refused():
    case = Case("plain")
    factors = factors_of(case, 4, torch.float32)
    wrong = factors | {"down_right": factors["down_right"][:, :, 1:]}
    with pytest.raises(ValueError, match=r"the adapter of down_proj \(8, 48, 24\) must have factors .* found"):
        run_adapted(case, case.tensors(torch.float32), wrong, "torch")
    with pytest.raises(
        ValueError, match=r"the adapter of gate_up_proj is torch.float64 but the weight is torch.float32"
    ):
        run_adapted(case, case.tensors(torch.float32), factors_of(case, 4, torch.float64), "torch")
    with pytest.raises(ValueError, match=r"backend 'sonic': adapters of experts are not supported"):
        run_adapted(case, case.tensors(torch.float32), factors, "sonic")


def test_trained_biases_beside_adapters_are_refused_and_frozen_ones_are_not():
    """The kernels have no gradient of theirs; so `auto` takes the experts of torch."""
    hidden, weight, bias = torch.randn(4, 8), torch.randn(2, 16, 8), torch.randn(2, 16)
    adapter = LowRank(torch.randn(2, 3, 8), torch.randn(2, 16, 3), 1.0)
    options = SimpleNamespace(adapters=ExpertAdapters(adapter), post_expert_norm="stops here")
    for is_trained, reason in ((True, "weights and biases are frozen"), (False, "post_expert_norm")):
        bias.requires_grad_(is_trained)
        assert reason in triton_backend.unsupported(hidden, weight, weight, options, (bias, None))
