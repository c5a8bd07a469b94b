"""The experts in FP8: on the CPU in Triton's interpreter at small sizes, on a GPU as they are.

Compared with `fp8_reference`, which rounds in the same places, and with the exact layer in units of the rounding of e4m3.
"""

from __future__ import annotations

import pytest
import torch
from interpreted_fp8 import patch
from moe_cases import GRADIENTS, Case, run
from offline_hopper import needs_gluon
from rounding import UNITS, error
from torch import Tensor, nn

from patchgen.kernels.fused_moe import fused_moe
from patchgen.kernels.moe import early_gradients, fp8_product, fp8_reference
from patchgen.kernels.moe.adapters import ExpertAdapters, LowRank
from patchgen.kernels.moe.combine import sum_slots
from patchgen.kernels.moe.fp8_values import (
    Quantised,
    quantise_tokens,
    quantise_transposed,
    quantise_weight,
    transpose_quantised,
    transpose_rows,
    transpose_tokens,
)
from patchgen.kernels.moe.options import MoeOptions
from patchgen.kernels.moe.plan import BLOCK_M, make_plan
from patchgen.kernels.peers import pushed_sums
from patchgen.kernels.peers.pushed_sums import PushTargets
from patchgen.kernels.unsupported import UnsupportedOptionError

on_gpu = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
UNIT = 2.0**-4
"""Of e4m3, the largest relative error of a value."""
SMALL = {"num_tokens": 7, "num_experts": 2, "hidden_size": 48, "intermediate_size": 16}
CASES = [
    Case("plain", **SMALL),
    Case("left_out", routing="left_out", **SMALL),
    Case("clamped", activation=None, **SMALL),
    Case("gelu_tanh", activation="gelu_tanh", **SMALL),
    Case("one_token", **(SMALL | {"num_tokens": 1})),
    Case("all_to_one", routing="one_expert", top_k=1, **SMALL),
    Case("all_left_out", routing="all_left_out", **SMALL),
    Case("several_tiles", num_tokens=140, num_experts=1, top_k=1, hidden_size=272, intermediate_size=80),
]


@pytest.fixture(autouse=True)
def _conversions(monkeypatch):
    if not on_gpu:
        patch(monkeypatch)


BACKENDS = {"fp8": False, "fp8_wide_gradients": True}


def referenced(case: Case, tensors: dict[str, Tensor], wide_gradients: bool) -> dict[str, Tensor]:
    """What `run` returns, by the reference."""
    leaves = {name: one.detach().clone().requires_grad_(one.is_floating_point()) for name, one in tensors.items()}
    gate = MoeOptions(**case.options()).gate
    out = fp8_reference.fp8_reference(**leaves, gate=gate, wide_gradients=wide_gradients)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))
    gradients = {
        f"d_{name}": torch.zeros_like(leaves[name]) if leaves[name].grad is None else leaves[name].grad
        for name in GRADIENTS
        if name in leaves
    }
    return {"out": out.detach(), **gradients}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sampled(3)
def test_the_kernels_round_where_the_reference_rounds(case: Case, backend: str):
    """Far closer to it than one rounding of e4m3; a value on the border of two may fall to the other side."""
    tensors = case.tensors(DTYPE, DEVICE)
    expected, found = referenced(case, tensors, BACKENDS[backend]), run(case, tensors, backend)
    for name in expected:
        assert error(found[name], expected[name]) <= UNIT / (4 if on_gpu else 64), name


def test_the_layer_errs_by_the_rounding_of_its_factors():
    """Output and gradients are two or three products deep, each factor off by up to one unit, in the mean 0.4 of one."""
    case = Case("plain", num_tokens=24, num_experts=2, hidden_size=64, intermediate_size=32)
    tensors = case.tensors(DTYPE, DEVICE)
    exact = {name: one.double() if one.is_floating_point() else one for name, one in tensors.items()}
    expected, found = run(case, exact, "reference"), run(case, tensors, "fp8")
    for name in expected:
        assert 0.25 * UNIT < error(found[name], expected[name]) < 1.5 * UNIT, name


def test_wide_gradients_of_weights_err_by_what_comes_to_them_and_all_else_has_the_same_bits():
    """What FP8 made comes to them, h and g, but none of their factors is rounded to it."""
    case = Case("wide", num_tokens=64, num_experts=2, hidden_size=64, intermediate_size=32, routing="left_out")
    tensors = case.tensors(DTYPE, DEVICE)
    exact = {name: one.double() if one.is_floating_point() else one for name, one in tensors.items()}
    expected, narrow = run(case, exact, "reference"), run(case, tensors, "fp8")
    wide = run(case, tensors, "fp8_wide_gradients")
    for name in ("out", "d_hidden_states", "d_top_k_weights"):
        assert torch.equal(wide[name], narrow[name]), name
    for name in ("d_gate_up_proj", "d_down_proj"):
        assert error(wide[name], expected[name]) < 0.95 * error(narrow[name], expected[name]), name


def test_tokens_of_all_magnitudes_err_alike():
    """Scales are of rows: a token a million times smaller than another has as many digits."""
    case = Case("magnitudes", num_tokens=8, num_experts=2, top_k=1, hidden_size=64, intermediate_size=32)
    tensors = case.tensors(DTYPE, DEVICE)
    factors = 10.0 ** torch.arange(-4, 4, device=DEVICE, dtype=DTYPE)[:, None]
    tensors["hidden_states"] = tensors["hidden_states"] * factors
    exact = {name: one.double() if one.is_floating_point() else one for name, one in tensors.items()}
    expected, found = run(case, exact, "reference")["out"], run(case, tensors, "fp8")["out"]
    for token in range(case.num_tokens):
        assert error(found[token], expected[token]) < 3 * UNIT, token


def values_of_rows() -> Tensor:
    """Zeros, one value, the ends of the range of a scale, tiny and huge ones, and random ones."""
    rows = torch.randn(8, 48, generator=torch.Generator().manual_seed(0))
    rows[0] = 0
    rows[1] = 0
    rows[1, 3] = -448
    rows[2] = rows[2].clamp(-1, 1)
    rows[2, 0] = 450.0  # beyond the largest e4m3, and exact in bf16
    rows[3] *= 1e-25
    rows[4] *= 1e25
    return rows.to(DEVICE, DTYPE)


def test_tokens_are_quantised_once_and_written_to_each_of_their_rows():
    tokens = values_of_rows()
    index = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 0], [3, 2], [2, 3], [1, 3], [3, 3]], device=DEVICE)
    plan = make_plan(index, 3)  # 3 marks a slot that is left out
    rows, scales = quantise_tokens(tokens, plan, 2)
    values, expected_scales = fp8_reference.quantise(tokens)
    assert torch.equal(scales, expected_scales)
    assert scales.frexp().mantissa.eq(0.5).all() and scales[0] == 2.0**-60 and scales[1] == 1 and scales[2] == 2
    padded = plan.padded_of_slot.view(8, 2)
    for token in range(8):
        for row in padded[token].tolist():
            if row >= 0:
                assert torch.equal(rows.values[row].float(), values[token]) and rows.scales[row] == scales[token]
    assert (padded >= 0).sum() == 11


@pytest.mark.parametrize("shape", [(2, 48, 80), (1, 144, 64)])
def test_weights_are_quantised_by_row_and_transposed_by_expert(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[0, 3] *= 1e3
    weight = weight.to(DEVICE, DTYPE)
    found = quantise_weight(weight)
    values, scales = fp8_reference.quantise(weight)
    assert torch.equal(found.values.float(), values) and torch.equal(found.scales, scales)
    transposed = quantise_transposed(weight, found.scales)
    largest = scales.amax(1)
    assert torch.equal(transposed.scales, largest[:, None].expand(-1, shape[2]))
    expected = fp8_reference.rounded(values * (scales / largest[:, None])[..., None])
    assert torch.equal(transposed.values.float(), expected.transpose(1, 2))
    again = transpose_quantised(found)
    assert torch.equal(again.values.view(torch.uint8), transposed.values.view(torch.uint8))
    assert torch.equal(again.scales, transposed.scales)


def test_factors_of_weight_gradients_lose_no_digit_by_their_common_scale():
    """Rows times both scales, over the expert's, are the same numbers as rows: powers of two apart, however far."""
    index = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 0], [3, 2], [2, 3], [1, 3], [3, 3]], device=DEVICE)
    plan = make_plan(index, 3)
    tokens = values_of_rows()
    _, scales = quantise_tokens(tokens, plan, 2)
    transposed = transpose_tokens(tokens, scales, plan, 2).float()
    rows = torch.randn(plan.num_padded, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    values, row_scales = fp8_reference.quantise(rows)
    others = torch.tensor([1.0, 4.0, 0.5, 2.0, 1.0, 8.0, 1.0, 1.0], device=DEVICE)
    folded, of_expert = transpose_rows(Quantised(values.to(fp8_reference.DTYPE), row_scales), others, plan, 2)
    for expert in range(3):
        first = int(plan.tile_start[expert]) * BLOCK_M
        used = first + torch.arange(int(plan.row_start[expert + 1] - plan.row_start[expert]), device=DEVICE)
        token = plan.slot_of_padded[used].long() // 2
        assert torch.equal(transposed[:, used].T, fp8_reference.quantise(tokens)[0][token])
        expected, scale = fp8_reference.fold(values[used], row_scales[used] * others[token])
        assert of_expert[expert] == scale and torch.equal(folded[:, used].float().T, expected)
        kept = expected.abs() >= 2.0**-6
        exact = values[used] * (row_scales[used] * others[token] / scale)[:, None]
        assert torch.equal(expected[kept], exact[kept])


def one_sign(*shape: int, seed: int) -> Quantised:
    return quantise_weight(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).abs().to(DEVICE, DTYPE))


def test_sums_of_one_sign_are_promoted():
    """Over a depth of thousands, against fp64: off by the rounding of the result and what tensor cores lose over 128 products.

    That is 6e-4 on an H200, at any depth; sums that stay in its tensor cores are 0.006 too small over a depth of 512, 0.11
    over 7,168 and 0.22 over 16,384. Triton's interpreter sums in fp32: there the test is of the products alone.
    """
    depth = 8192 if on_gpu else 384
    bar = 2.0**-10 + torch.finfo(DTYPE).eps / 4 if on_gpu else UNITS * torch.finfo(DTYPE).eps
    plan = make_plan(torch.zeros(depth, 1, dtype=torch.int64, device=DEVICE), 1)
    rows, weight = one_sign(plan.num_padded, depth, seed=1), one_sign(1, 144, depth, seed=2)
    exact_rows, exact_weight = (one.values.double() * one.scales.double()[..., None] for one in (rows, weight))
    left, right = (one_sign(size, plan.num_padded, seed=size).values for size in (80, 272))
    half = torch.full((1,), 0.5, device=DEVICE)
    results = {
        "product": (
            fp8_product.fp8_product(rows, weight, plan, DTYPE)[:depth],
            exact_rows[:depth] @ exact_weight[0].T,
        ),
        "gradient": (
            fp8_product.fp8_weight_gradient(left, right, half, plan, DTYPE)[0],
            left[:, :depth].double() @ right[:, :depth].double().T / 2,
        ),
    }
    for name, (found, exact) in results.items():
        assert error(found, exact) < bar, name
        if on_gpu:  # the rounding of results has no sign
            assert abs(float((found.double() * exact).sum() / exact.square().sum()) - 1) < 2.0**-10, name


@pytest.mark.gpu
@needs_gluon
@pytest.mark.parametrize(
    ("depth", "columns", "counts"),
    [
        (2096, 208, (300, 0, 129)),
        (256, 768, (40, 700, 1)),
        (128, 512, (200, 0, 130)),
        (64, 208, (1, 300, 0)),
        (16, 80, (40, 0, 129)),
    ],
)
def test_kernels_with_warp_roles_have_the_bits_of_those_in_triton(monkeypatch, depth, columns, counts):
    """Depths, columns and rows that no tile divides, depths of one step, and an expert without rows."""
    index = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))[:, None].to(DEVICE)
    plan = make_plan(index, 3)
    used = int(plan.tile_start[-1]) * BLOCK_M
    rows, weight = one_sign(plan.num_padded, depth, seed=1), one_sign(3, columns, depth, seed=2)
    left, right = (one_sign(size, plan.num_padded, seed=3).values for size in (depth, columns))
    scales = torch.rand(3, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def both() -> tuple[Tensor, Tensor]:
        product = fp8_product.fp8_product(rows, weight, plan, DTYPE)[:used]
        return product, fp8_product.fp8_weight_gradient(left, right, scales, plan, DTYPE)

    assert fp8_product.is_specialized_here(left)
    with_roles = both()
    monkeypatch.setattr(fp8_product, "is_specialized_here", lambda tensor: False)
    for found, expected in zip(with_roles, both(), strict=True):
        assert torch.equal(found, expected)


def test_a_gradient_that_is_put_off_has_the_same_bits():
    """Where those of tokens are awaited and its weight takes one late."""
    case = Case("put_off", num_tokens=6, num_experts=2, hidden_size=32, intermediate_size=16)
    tensors = case.tensors(DTYPE, DEVICE)
    expected = run(case, tensors, "fp8")
    leaves = {name: one.clone().requires_grad_(one.is_floating_point()) for name, one in tensors.items()}
    taken: list[Tensor] = []
    handed: list[Tensor] = []
    setattr(leaves["down_proj"], early_gradients.DEFERRED_GRADIENT_SINK, taken.append)
    out = fused_moe(**leaves, **case.options(), backend="fp8")
    out.register_hook(lambda _: early_gradients.await_gradients(lambda *both: handed.extend(both)))
    with torch.autograd.set_multithreading_enabled(False):  # what is awaited is of a thread
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))
    assert not taken and leaves["down_proj"].grad is None
    early_gradients.compute_deferred()
    found = {f"d_{name}": one.grad for name, one in leaves.items()} | {"d_down_proj": taken.pop()}
    assert torch.equal(handed[0], expected["d_hidden_states"]) and torch.equal(handed[1], expected["d_top_k_weights"])
    for name in expected.keys() - {"out"}:
        assert torch.equal(found[name], expected[name]), name


def test_sums_go_to_whom_they_are_offered(monkeypatch):
    """Handed over instead of returned, as those of the Triton experts: the same rows, for the same sums."""
    case = Case("offered", num_tokens=6, num_experts=2, hidden_size=32, intermediate_size=16)
    tensors = case.tensors(DTYPE, DEVICE)
    expected = fused_moe(**tensors, **case.options(), backend="fp8")
    pushed: list[tuple] = []
    monkeypatch.setattr(pushed_sums, "push", lambda targets, *sums: pushed.append((targets, *sums)))
    offered = PushTargets([], None, 0)
    with pushed_sums.offer(offered):
        fused_moe(**tensors, **case.options(), backend="fp8")
    [(targets, rows, weights, row_of_slot, top_k)] = pushed
    assert targets is offered and torch.equal(sum_slots(rows, weights, row_of_slot, top_k), expected)


def test_the_operators_pass_torchs_own_checks():
    """Schema, fake kernel and autograd registration. Rows of no expert are undefined, so what is kept is not compared."""
    case = Case("opcheck", num_tokens=4, num_experts=2, hidden_size=32, intermediate_size=16)
    tensors = case.tensors(DTYPE, DEVICE)
    names = ("hidden_states", "top_k_index", "top_k_weights", "gate_up_proj", "down_proj")
    inputs = [tensors[name].requires_grad_(tensors[name].is_floating_point()) for name in names]
    torch.library.opcheck(
        torch.ops.patchgen.moe_fp8_forward.default,
        (*inputs, "silu", 1.0, float("inf"), 0.0, False, False, tensors["top_k_index"].numel(), True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.slow
def test_torch_compile_of_a_layer_has_no_graph_break_and_its_gradients():
    case = Case("compile", num_tokens=4, num_experts=2, hidden_size=32, intermediate_size=16)
    tensors = case.tensors(DTYPE, DEVICE)
    index = tensors.pop("top_k_index")

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.act_fn = nn.SiLU()

        def forward(self, tensors):
            options = {"num_experts": case.num_experts, "activation": self.act_fn, "backend": "fp8"}
            return fused_moe(**tensors, top_k_index=index, **options) * 2

    results = []
    for layer in (Layer(), torch.compile(Layer(), fullgraph=True, backend="aot_eager")):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        out = layer(leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_a_gradient_that_is_not_needed_is_not_computed():
    case = Case("frozen", num_tokens=6, num_experts=2, hidden_size=32, intermediate_size=16)
    tensors = case.tensors(DTYPE, DEVICE)
    expected = run(case, tensors, "fp8")
    tensors["hidden_states"].requires_grad_()
    out = fused_moe(**tensors, **case.options(), backend="fp8")
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))
    assert torch.equal(tensors["hidden_states"].grad, expected["d_hidden_states"])
    assert tensors["gate_up_proj"].grad is None and tensors["top_k_weights"].grad is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"has_bias": True}, "biases"),
        ({"is_transposed": True}, "is_transposed=True"),
        ({"is_interleaved": True, "activation": None}, "is_interleaved=True"),
        ({"is_gated": False, "activation": "relu2"}, "is_gated=False"),
        ({"hidden_size": 40}, "hidden size 40 is not a multiple of 16"),
        ({"intermediate_size": 24}, "intermediate size 24 is not a multiple of 16"),
        ({"has_post_norm": True}, "post_expert_norm"),
    ],
)
def test_what_the_kernels_do_not_have_is_refused_by_name(changes, message):
    case = Case("refused", **SMALL).at(**changes)
    with pytest.raises(UnsupportedOptionError, match=f"backend 'fp8': .*{message}"):
        fused_moe(**case.tensors(DTYPE, DEVICE), **case.options(), backend="fp8")


def test_adapters_are_refused():
    case = Case("adapters", **SMALL)
    tensors = case.tensors(DTYPE, DEVICE)
    adapter = LowRank(torch.zeros(2, 32, 4).to(DEVICE, DTYPE), torch.zeros(2, 4, 48).to(DEVICE, DTYPE), 1.0)
    with pytest.raises(UnsupportedOptionError, match="adapters"):
        fused_moe(**tensors, **case.options(), adapters=ExpertAdapters(adapter, None), backend="fp8")
