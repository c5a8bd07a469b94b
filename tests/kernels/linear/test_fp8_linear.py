"""Linear layers in FP8: the operator against its parts, `nn.Linear` and, on a GPU, the reference in torch.

On the CPU the operator computes by `fp8_reference`; the kernels of `fp8_products` run in Triton's interpreter.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from interpreted_fp8 import patch
from rounding import error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patchgen.kernels.linear import fp8_linear, fp8_products, fp8_reference
from patchgen.runtime.parallel import checkpointing

on_gpu = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
UNIT = 2.0**-4
"""Of e4m3, the largest relative error of a value."""


@pytest.fixture(autouse=True)
def _conversions(monkeypatch):
    if not on_gpu:
        patch(monkeypatch)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def layer(
    *, bias: bool = True, narrow: bool = False, inputs: int = 96, outputs: int = 48
) -> tuple[nn.Linear, nn.Linear]:
    """A layer in FP8 and one of the same parameters in fp32."""
    exact = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        exact.weight.copy_(random(outputs, inputs, seed=1))
    narrow_layer = copy.deepcopy(exact).to(DEVICE, DTYPE)
    fp8_linear.convert(narrow_layer, narrow_gradient=narrow)
    return narrow_layer, exact.to(DEVICE)


def step(linear: nn.Linear, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients for a fixed gradient of the output."""
    linear.zero_grad()
    leaf = x.clone().requires_grad_()
    out = linear(leaf)
    out.backward(random(*out.shape, seed=2).to(out))
    gradients = {f"d_{name}": parameter.grad for name, parameter in linear.named_parameters()}
    return {"out": out.detach(), "d_x": leaf.grad} | gradients


def test_a_layer_in_fp8_has_the_parameters_of_nn_linear():
    found, exact = layer()
    assert isinstance(found, nn.Linear)
    assert [*found.state_dict()] == [*exact.state_dict()] == ["weight", "bias"]
    assert torch.equal(found.weight.float(), exact.weight.to(DTYPE).float())


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_errs_by_the_rounding_of_its_factors(narrow: bool, bias: bool):
    """Each product by that of two factors, in the mean 0.4 units each; a weight gradient that is not narrow not at all."""
    found, exact = layer(bias=bias, narrow=narrow)
    x = random(4, 33, 96)
    results, expected = step(found, x), step(exact, x.float())
    for name in ("out", "d_x", *(["d_weight"] if narrow else [])):
        assert 0.25 * UNIT < error(results[name], expected[name]) < UNIT, name
    for name in results.keys() - {"out", "d_x", *(["d_weight"] if narrow else [])}:
        assert error(results[name], expected[name]) < 8e-3, name


@pytest.mark.parametrize("narrow", [False, True])
def test_the_layer_computes_what_its_parts_give(narrow: bool):
    """The same bits as the reference's on a CPU, on a GPU up to the order of sums and their bf16 results."""
    found, _ = layer(narrow=narrow)
    x = random(40, 96)
    results = step(found, x)
    weight, grad = found.weight.detach(), random(40, 48, seed=2)
    values, scales = fp8_reference.rows(x)
    weight_values, weight_scales = fp8_reference.rows(weight)
    grads, grad_scales = fp8_reference.rows(grad)
    expected = {
        "out": fp8_reference.product(values, scales, weight_values, weight_scales, found.bias.detach(), DTYPE),
        "d_x": fp8_reference.product(
            grads, grad_scales, *fp8_reference.other_side(weight, weight_scales), None, DTYPE
        ),
        "d_weight": fp8_reference.weight_gradient(grads, grad_scales, values, scales, DTYPE) if narrow else grad.T @ x,
        "d_bias": grad.sum(0),
    }
    for name, one in expected.items():
        assert error(results[name], one) <= (UNIT / 8 if on_gpu else 0), name


def test_tokens_of_all_magnitudes_err_alike_and_do_not_depend_on_their_neighbours():
    """A scale is of one token: a part of the tokens has the same bits as all of them, on a CPU, and on a GPU nearly so."""
    found, exact = layer(bias=False)
    x = random(8, 96) * (10.0 ** torch.arange(-4, 4, device=DEVICE, dtype=DTYPE))[:, None]
    results, expected, part = step(found, x)["out"], step(exact, x.float())["out"], step(found, x[2:5])["out"]
    for token in range(8):
        assert error(results[token], expected[token]) < UNIT, token
    assert error(part, results[2:5]) <= (UNIT / 8 if on_gpu else 1e-6)


def test_five_steps_have_the_same_bits():
    for narrow in (False, True):
        found, _ = layer(narrow=narrow, inputs=256, outputs=128)
        x = random(300, 256)
        first = step(found, x)
        for _ in range(4):
            again = step(found, x)
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_layers_that_read_one_tensor_quantise_it_once(monkeypatch):
    """As q, k and v do; an input that was written since is quantised again, one that was given other memory, and another with the
    same values."""
    calls: list[tuple] = []
    products = fp8_products if on_gpu else fp8_reference
    rows = products.rows
    monkeypatch.setattr(products, "rows", lambda values: calls.append(values.shape) or rows(values))
    layers = [layer(outputs=outputs)[0] for outputs in (64, 16, 16)]
    x = random(5, 96)
    outs = [one(x) for one in layers]
    assert calls.count((5, 96)) == 1 and len(calls) == 1 + len(layers)
    layers[0](x.clone())
    assert calls.count((5, 96)) == 2
    x.mul_(-1)
    assert error(layers[0](x), -outs[0] + 2 * layers[0].bias) < 1e-2 and calls.count((5, 96)) == 3
    x.data = -x.data
    assert error(layers[0](x), outs[0]) < 1e-2 and calls.count((5, 96)) == 4


def test_no_tokens_and_frozen_weights_and_inputs():
    found, _ = layer()
    empty = random(0, 96).requires_grad_()
    found(empty).sum().backward()
    assert found(empty).shape == (0, 48) and empty.grad.shape == (0, 96)
    assert not found.weight.grad.any() and not found.bias.grad.any()
    x, expected = random(7, 96), step(found, random(7, 96))
    found.zero_grad()
    found.weight.requires_grad_(False)
    frozen = step(found, x)
    assert frozen["d_weight"] is None and torch.equal(frozen["d_x"], expected["d_x"])
    found.weight.requires_grad_(True)
    found(x).backward(random(7, 48, seed=2))  # an input without a gradient
    assert torch.equal(found.weight.grad, expected["d_weight"])


@pytest.mark.parametrize("narrow", [False, True])
def test_a_layer_that_is_computed_again_has_the_same_gradients(narrow: bool):
    found, _ = layer(narrow=narrow)
    x = random(9, 96)
    expected = step(found, x)
    found.zero_grad()
    leaf = x.clone().requires_grad_()
    checkpoint(found, leaf, use_reentrant=False).backward(random(9, 48, seed=2))
    assert torch.equal(leaf.grad, expected["d_x"]) and torch.equal(found.weight.grad, expected["d_weight"])


@pytest.mark.parametrize("narrow", [False, True])
def test_layers_that_are_compiled_or_keep_their_products_have_the_same_bits(narrow: bool):
    """There the layer is an operator, which the compiler does not look into and selective checkpointing does not run again."""
    found, _ = layer(narrow=narrow)
    x = random(9, 96)
    expected = step(found, x)
    compiled = torch.compile(found, fullgraph=True, backend="aot_eager")
    runs: list[torch.Size] = []
    products = fp8_products if on_gpu else fp8_reference

    def selective(leaf: Tensor) -> Tensor:
        return checkpoint(found, leaf, use_reentrant=False, context_fn=partial(checkpointing.contexts, "selective"))

    for run in (compiled, selective):
        found.zero_grad()
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                products, "rows", lambda values, rows=products.rows: runs.append(values.shape) or rows(values)
            )
            out.backward(random(9, 48, seed=2))
        assert torch.equal(out, expected["out"]) and torch.equal(leaf.grad, expected["d_x"])
        assert torch.equal(found.weight.grad, expected["d_weight"])
    assert runs == [(9, 48)] * 2, "in the backward only its own gradient is quantised"


def test_sums_of_one_sign_are_not_too_small():
    """Over as many tokens as a row has: a gradient that is the same for all of them."""
    found, _ = layer(bias=False, narrow=True, inputs=64, outputs=64)
    x, grad = (random(16384 if on_gpu else 512, 64, seed=seed).abs() for seed in (3, 4))
    found(x).backward(grad)
    exact = grad.double().T @ x.double()
    bar = 5e-3 if on_gpu else 2e-3  # there in bf16, where sums that are not promoted are 0.24 too small
    assert abs(float((found.weight.grad.double() * exact).sum() / exact.square().sum()) - 1) < bar


@pytest.mark.parametrize("shape", [(40, 48), (130, 272), (16, 16)])
def test_the_kernels_of_the_factors_round_where_the_reference_rounds(shape: tuple[int, int]):
    """Rows, the other side of a weight, and both transposed factors of a weight gradient: the same bytes."""
    values = random(*shape)
    values[3] *= 1e3
    rows, scales = fp8_products.rows(values)
    expected_rows, expected_scales = fp8_reference.rows(values)
    assert torch.equal(rows.view(torch.uint8), expected_rows.view(torch.uint8)) and torch.equal(
        scales, expected_scales
    )
    other, other_scales = fp8_products.other_side(values, scales)
    expected, largest = fp8_reference.other_side(values, scales)
    assert torch.equal(other.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(other_scales, largest)
    plain = fp8_products.transposed(rows, None, None)
    padding = -shape[0] % 16
    assert plain.shape == (shape[1], shape[0] + padding) and not plain[:, shape[0] :].float().any()
    assert torch.equal(plain[:, : shape[0]].float(), rows.float().T)
    factors = 2.0 ** -torch.arange(shape[0], device=DEVICE).remainder(12).float()
    folded = fp8_products.transposed(rows, factors, factors.amax())[:, : shape[0]]
    assert torch.equal(folded.float(), fp8_reference.fold(rows.float(), factors)[0].T)


def test_what_cannot_compute_in_fp8_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="90 inputs and 48 outputs are not both multiples of 16"):
        fp8_linear.convert(nn.Linear(90, 48))
    with pytest.raises(ValueError, match="a NonDynamicallyQuantizableLinear may compute something else"):
        fp8_linear.convert(nn.modules.linear.NonDynamicallyQuantizableLinear(16, 16))


@pytest.mark.parametrize("narrow", [False, True])
def test_the_operators_pass_torchs_own_checks(narrow: bool):
    x, weight, bias = random(8, 32).requires_grad_(), random(16, 32).requires_grad_(), random(16).requires_grad_()
    values, scales = torch.ops.patchgen.fp8_rows(x.detach())
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.patchgen.fp8_rows, (x.detach(),), test_utils=utilities)
    arguments = (x, weight, bias, values, scales, narrow)
    torch.library.opcheck(torch.ops.patchgen.fp8_linear, arguments, test_utils=utilities)
