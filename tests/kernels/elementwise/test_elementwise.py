"""The eager formulas against upstream's modules, bit by bit; the compiled ones against the eager ones."""

from __future__ import annotations

import pytest
import torch
from rounding import require_equal_up_to_rounding
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from patchgen.kernels.elementwise import formulas, norm_quack
from patchgen.kernels.unsupported import UnsupportedOptionError

NORMS = {
    "llama": (LlamaRMSNorm, {}),
    "gpt_oss": (GptOssRMSNorm, {"in_fp32": True}),
    "gemma": (GemmaRMSNorm, {"in_fp32": True, "offset": 1.0}),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_upstreams_bit_by_bit(name: str, dtype: torch.dtype):
    upstream, options = NORMS[name]
    norm = upstream(32, eps=1e-6).to(dtype)
    nn.init.normal_(norm.weight)
    hidden = torch.randn(3, 5, 32, dtype=dtype)
    assert torch.equal(formulas.rms_norm(hidden, norm.weight, 1e-6, **options), norm(hidden))


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_rotary_is_upstreams_bit_by_bit(unsqueeze_dim: int):
    query, key, cos, sin = rotary_inputs(unsqueeze_dim)
    expected = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=unsqueeze_dim)
    found = formulas.rotary(query, key, cos, sin, unsqueeze_dim)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def rotary_inputs(unsqueeze_dim: int) -> tuple[torch.Tensor, ...]:
    shape = (2, 4, 7, 8) if unsqueeze_dim == 1 else (2, 7, 4, 8)
    key_shape = (2, 1, 7, 8) if unsqueeze_dim == 1 else (2, 7, 1, 8)
    return torch.randn(shape), torch.randn(key_shape), torch.randn(2, 7, 8), torch.randn(2, 7, 8)


COMPILED = {
    "rms_norm": (
        lambda function_name, x, w: getattr(formulas, function_name)(x, w, 1e-6),
        lambda: (torch.randn(6, 32), torch.randn(32)),
    ),
    "rotary": (lambda function_name, *inputs: getattr(formulas, function_name)(*inputs), lambda: rotary_inputs(1)),
    "gated_activation": (
        lambda function_name, gate, up: getattr(formulas, function_name)(gate, up, nn.SiLU()),
        lambda: (torch.randn(6, 32), torch.randn(6, 32)),
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager_with_gradients(name: str):
    call, make = COMPILED[name]
    inputs = [tensor.requires_grad_() for tensor in make()]
    results = []
    for function_name in (name, f"{name}_compiled"):
        out = call(function_name, *inputs)
        total = sum((part * torch.arange(part.numel()).reshape(part.shape)).sum() for part in as_tuple(out))
        results.append((as_tuple(out), torch.autograd.grad(total, inputs)))
    for eager, compiled in zip(*results, strict=True):
        for expected, found in zip(eager, compiled, strict=True):
            require_equal_up_to_rounding(found, expected)


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def test_gated_activation_compiled_refuses_an_activation_it_does_not_know():
    with pytest.raises(ValueError, match="Mish"):
        formulas.gated_activation_compiled(torch.randn(2, 4), torch.randn(2, 4), nn.Mish())


def test_the_choice_of_a_norm_without_quack_or_a_gpu_is_the_compiled_formula():
    hidden, weight = torch.randn(4, 32), torch.randn(32)
    found = norm_quack.rms_norm_auto(hidden, weight, 1e-6)
    require_equal_up_to_rounding(found, formulas.rms_norm(hidden, weight, 1e-6))
    with pytest.raises(UnsupportedOptionError, match=r"rms_norm='quack': .*use rms_norm='compiled' or 'auto'"):
        norm_quack.rms_norm_quack(hidden, weight, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NORMS)
def test_quack_is_as_near_to_fp32_as_eager(name: str):
    """Output and both gradients in bf16, against the eager formula in fp32: no further than 1.5 times
    eager bf16 plus 1e-3 of the norm."""
    if not (torch.cuda.is_available() and norm_quack.unavailable() is None):
        pytest.skip("it needs a CUDA device and quack")
    _, options = NORMS[name]
    values = [
        torch.randn(64, 2048, device="cuda"),
        torch.randn(2048, device="cuda"),
        torch.randn(64, 2048, device="cuda"),
    ]

    def run(function, compute_dtype):
        """With the same bf16 values in each dtype."""
        hidden, weight, direction = (value.to(torch.bfloat16).to(compute_dtype) for value in values)
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        out = function(*leaves, 1e-6, **options)
        return [out, *torch.autograd.grad(out, leaves, direction)]

    exact = run(formulas.rms_norm, torch.float32)
    eager, found = run(formulas.rms_norm, torch.bfloat16), run(norm_quack.rms_norm_quack, torch.bfloat16)
    for one, other, truth in zip(found, eager, exact, strict=True):
        bar = 1.5 * float((other.float() - truth).norm()) + 1e-3 * float(truth.norm())
        assert float((one.float() - truth).norm()) <= bar


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("heads_are_transposed_in_memory", [False, True])
def test_rotary_is_compiled_for_the_order_in_memory(
    unsqueeze_dim: int, heads_are_transposed_in_memory: bool, monkeypatch
):
    """The compiled function gets heads in their order in memory (`[B, S, N, D]` if transposed), so that gradients in that order
    are not copied; same numbers."""
    given = []

    def noted(function):
        def call(query, *rest):
            given.append(query.is_contiguous())
            return function(query, *rest)

        return call

    query, key, cos, sin = rotary_inputs(unsqueeze_dim)
    if heads_are_transposed_in_memory:
        query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    monkeypatch.setattr(formulas, "_compiled", noted)
    found = formulas.rotary_compiled(query, key, cos, sin, unsqueeze_dim)
    for one, other in zip(found, formulas.rotary(query, key, cos, sin, unsqueeze_dim), strict=True):
        assert torch.equal(one, other)
    assert given == [not heads_are_transposed_in_memory or unsqueeze_dim == 1]
