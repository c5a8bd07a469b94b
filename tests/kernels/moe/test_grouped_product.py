"""torch's grouped product and the operator that stands in for it: equal, differentiable, and traced in every dtype."""

from __future__ import annotations

import itertools

import pytest
import torch

from patchgen.kernels.moe.grouped_product import grouped_product, sum_per_expert

ENDS = torch.tensor([5, 5, 9, 14], dtype=torch.int32)  # an expert without rows, and two rows of no expert
ROWS, EXPERTS = 16, 4


def inputs(dtype, inner=16, outer=24, is_transposed=False):
    torch.manual_seed(0)
    rows = torch.randn(ROWS, inner, dtype=dtype, requires_grad=True)
    shape = (EXPERTS, outer, inner) if is_transposed else (EXPERTS, inner, outer)
    weight = torch.randn(shape, dtype=dtype, requires_grad=True)
    return rows, weight


def expected_product(rows, weight):
    ends = [0, *ENDS.tolist()]
    parts = [rows[start:end] @ weight[e] for e, (start, end) in enumerate(itertools.pairwise(ends))]
    return torch.cat(parts)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_operator_is_the_product_of_each_expert(dtype, is_transposed):
    """Values and both gradients against fp64; rows of no expert count nowhere."""
    rows, weight = inputs(dtype, is_transposed=is_transposed)
    wide = [tensor.detach().double().requires_grad_() for tensor in (rows, weight)]
    expected = expected_product(wide[0], wide[1].transpose(1, 2) if is_transposed else wide[1])
    seed = torch.randn(ROWS, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected.backward(seed[: ENDS[-1]].double())
    out = torch.ops.patchgen.grouped_product(rows, weight.transpose(1, 2) if is_transposed else weight, ENDS)
    out.backward(seed)
    bar = 16 * torch.finfo(dtype).eps
    for got, wanted in (
        (out[: ENDS[-1]], expected),
        (rows.grad[: ENDS[-1]], wide[0].grad[: ENDS[-1]]),
        (weight.grad, wide[1].grad),
    ):
        assert (got.double() - wanted).abs().max() <= bar * wanted.abs().max()


@pytest.mark.parametrize(
    "inner, outer, dtype", [(16, 24, torch.float32), (16, 24, torch.bfloat16), (5, 7, torch.float64)]
)
def test_the_operators_keep_what_torch_asks_of_operators(inner, outer, dtype):
    """Schema, fake tensors and autograd registration, by torch's own check."""
    rows, weight = inputs(dtype, inner, outer)
    end = ENDS.clone()
    end[-1] = ROWS  # what the tail holds is arbitrary, and the check compares everything
    tolerance = {"rtol": 16 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    torch.library.opcheck(torch.ops.patchgen.grouped_product, (rows, weight, end), **tolerance)
    grad = torch.randn(ROWS, outer, dtype=dtype)
    torch.library.opcheck(torch.ops.patchgen.grouped_outer_product, (rows.detach(), grad, end), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_is_traced_in_one_graph(dtype):
    rows, weight = inputs(dtype)

    def loss(rows, weight):
        product = grouped_product(rows, weight, ENDS)[:14]
        return (product * product).sum()

    expected = loss(rows, weight)
    expected_gradients = torch.autograd.grad(expected, (rows, weight))
    torch._dynamo.reset()
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(rows, weight)
    gradients = torch.autograd.grad(got, (rows, weight))
    bar = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=bar, atol=0)
    for one, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(
            one[:14] if one.ndim == 2 else one, wanted[:14] if wanted.ndim == 2 else wanted, rtol=bar, atol=bar * 10
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_each_experts_rows_is_traced_in_one_graph(dtype):
    """It is the gradient of a bias; rows of no expert count nowhere."""
    rows = inputs(dtype)[0].detach()
    bounds = [0, *ENDS.tolist()]
    expected = torch.stack([rows[start:end].double().sum(0) for start, end in itertools.pairwise(bounds)])
    torch._dynamo.reset()
    for function in (sum_per_expert, torch.compile(sum_per_expert, fullgraph=True, backend="aot_eager")):
        found = function(rows, ENDS)
        assert (found.double() - expected).abs().max() <= 16 * torch.finfo(dtype).eps * expected.abs().max()


def test_what_torchs_product_does_not_take_is_refused_on_other_devices():
    rows, weight = (tensor.detach().to("meta") for tensor in inputs(torch.float64))
    with pytest.raises(ValueError, match=r"takes bf16, fp16 and fp32 rows .* found torch.float64"):
        grouped_product(rows, weight, ENDS)
