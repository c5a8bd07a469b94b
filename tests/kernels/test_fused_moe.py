"""The backends of the fused experts against the expert-by-expert reference in fp64."""

from __future__ import annotations

import pytest
import torch
from moe_cases import CASES, Case, run
from rounding import require_as_exact, require_rounding
from torch import nn

from patchgen.kernels.fused_moe import fused_moe

NAMED = [pytest.param(case, id=case.name) for case in [*CASES, Case("post_norm", has_post_norm=True)]]


def doubled(tensors: dict) -> dict:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("case", NAMED)
def test_torch_backend_equals_the_reference_in_fp64(case: Case):
    tensors = case.tensors(torch.float64)
    expected, found = run(case, tensors, "reference"), run(case, tensors, "torch")
    for name in expected:
        require_rounding(found[name], expected[name], what=name)


@pytest.mark.parametrize("case", NAMED)
def test_torch_backend_in_bf16_errs_no_more_than_the_eager_loop_times_one_and_a_half(case: Case):
    tensors = case.at(hidden_size=128, intermediate_size=64, num_tokens=case.num_tokens * 2).tensors(torch.bfloat16)
    yardstick = run(case, doubled(tensors), "reference")
    eager, found = run(case, tensors, "reference"), run(case, tensors, "torch")
    for name in yardstick:
        require_as_exact(found[name], eager[name], yardstick[name], factor=1.5, what=name)


def test_rows_that_are_left_out_are_read_nowhere():
    """With `nan` as the routing weight of every left-out slot, the result is that of any other weight there."""
    case = Case("left_out", routing="left_out", hidden_size=64, intermediate_size=32)
    tensors = case.tensors(torch.float32)
    expected = run(case, tensors, "torch")
    left_out = tensors["top_k_index"] == case.num_experts
    tensors["top_k_weights"] = tensors["top_k_weights"].masked_fill(left_out, float("nan"))
    found = run(case, tensors, "torch")
    assert left_out.any()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert not found["d_top_k_weights"][left_out].any()


def test_reference_gradients_by_finite_differences():
    case = Case("gradcheck", num_tokens=5, num_experts=3, hidden_size=4, intermediate_size=3, has_bias=True)
    tensors = case.tensors(torch.float64)
    index = tensors.pop("top_k_index")
    names, leaves = list(tensors), [tensor.requires_grad_() for tensor in tensors.values()]

    def function(*arguments):
        named = dict(zip(names, arguments, strict=True))
        return fused_moe(**named, top_k_index=index, **case.options(), backend="reference")

    assert torch.autograd.gradcheck(function, leaves)


def test_no_tokens_give_no_rows_and_zero_gradients():
    case = Case("empty", num_tokens=0)
    found = run(case, case.tensors(torch.float32), "torch")
    assert found["out"].shape == (0, case.hidden_size)
    assert not found["d_gate_up_proj"].any() and not found["d_down_proj"].any()


def test_no_tokens_give_a_norm_behind_the_experts_a_zero_gradient():
    """Its weights are gathered, and their gradients summed, on all ranks or on none."""
    norm = nn.RMSNorm(8)
    rows, index, weights = torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)
    out = fused_moe(
        rows, index, weights, torch.ones(4, 6, 8), torch.ones(4, 8, 3), num_experts=4,
        activation=nn.SiLU(), post_expert_norm=norm, backend="torch",
    )  # fmt: skip
    out.sum().backward()
    assert out.shape == (0, 8) and norm.weight.grad is not None and not norm.weight.grad.any()


@pytest.mark.parametrize("routing", ["random", "left_out"])
def test_torch_compile_of_a_layer_around_it_has_no_graph_break(routing: str):
    case = Case("compile", hidden_size=64, intermediate_size=32, routing=routing)
    tensors = case.tensors(torch.bfloat16)
    expected = fused_moe(**tensors, **case.options(), backend="torch")

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.act_fn = nn.SiLU()

        def forward(self, **tensors):
            return fused_moe(**tensors, num_experts=case.num_experts, activation=self.act_fn, backend="torch") * 2

    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    require_rounding(compiled(**tensors), expected * 2, units=4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"down_proj": torch.zeros(8, 47, 24)}, "down_proj"),
        ({"gate_up_proj": torch.zeros(8, 24, 48)}, "gate_up_proj"),
        ({"hidden_states": torch.zeros(37, 48, dtype=torch.float64)}, "hidden_states"),
        ({"top_k_weights": torch.zeros(37, 3)}, "top_k_weights"),
        ({"top_k_index": torch.full((37, 2), 9)}, "top_k_index"),
        ({"num_experts": 7}, "num_experts"),
        ({"activation": None}, "activation"),
        ({"backend": "cutlass"}, "cutlass"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict, named: str):
    case = Case("plain")
    arguments = {**case.tensors(torch.float32), **case.options(), "backend": "torch"} | change
    with pytest.raises(ValueError, match=named):
        fused_moe(**arguments)
