"""Muon on matrices and stacks beside torch's own and a reference by singular values; which rows are matrices of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from patchgen.runtime import registry
from patchgen.runtime.train import muon_matrices, optimizers
from patchgen.runtime.train.muon import STEPS, Muon, Parts, orthogonalised
from patchgen.runtime.train.recipe import OptimConfig, RecipeError
from patchgen.runtime.verify.small_config import small_config

BF16 = 2.0**-8
HALVES = {Parts(2, dim, alternating) for dim in (0, 1) for alternating in (False, True)}


def test_a_matrix_is_stepped_as_by_torch():
    """Several steps of several shapes; both iterate in bf16, by products of other shapes."""
    torch.manual_seed(0)
    shapes = ((16, 48), (48, 16), (32, 32), (16, 48))
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(one.detach().clone()) for one in ours]
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    pairs = Muon([{"params": ours}], **settings), torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in pairs:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        largest_step = 3 * 0.02 * 0.2 * max(one.shape) ** 0.5
        torch.testing.assert_close(one, other, rtol=0, atol=4 * STEPS * BF16 * largest_step / max(one.shape) ** 0.5)
        assert torch.equal(pairs[0].state[one]["momentum_buffer"], pairs[1].state[other]["momentum_buffer"])


@pytest.mark.parametrize("shape", [(3, 12, 20), (3, 20, 12), (1, 8, 8)])
def test_orthogonalised_keeps_the_singular_vectors(shape):
    """In fp32 the iteration is the odd polynomial of its coefficients, applied five times to the singular values."""
    torch.manual_seed(1)
    matrices = torch.randn(shape)
    u, values, vt = torch.linalg.svd(
        matrices.double() / matrices.double().norm(dim=(1, 2), keepdim=True), full_matrices=False
    )
    for _ in range(STEPS):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(orthogonalised(matrices), (u * values.unsqueeze(1) @ vt).float(), rtol=0, atol=1e-4)
    in_bf16 = orthogonalised(matrices.bfloat16()).float()
    assert (in_bf16 - orthogonalised(matrices)).norm() < 8 * STEPS * BF16 * in_bf16.norm()


@pytest.mark.parametrize("parts", sorted(HALVES, key=str))
def test_halves_are_what_two_parameters_would_be(parts):
    """A stack of gate and up, however they are laid out, changes as a stack of each."""
    torch.manual_seed(2)
    gate, up = torch.randn(2, 3, 8, 12)
    gradients = torch.randn(2, 3, 8, 12)

    def together(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        whole = (
            torch.stack([first, second], dim=2).flatten(1, 2) if parts.alternating else torch.cat([first, second], 1)
        )
        return whole.mT.contiguous() if parts.dim == 1 else whole

    stack = nn.Parameter(together(gate, up))
    stack.grad = together(*gradients)
    apart = [nn.Parameter(one.clone()) for one in (gate, up)]
    for one, gradient in zip(apart, gradients, strict=True):
        one.grad = gradient.clone()
    settings = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    Muon([{"params": [stack]}], parts={stack: parts}, **settings).step()
    Muon([{"params": apart}], **settings).step()
    expected = together(*(one.detach() for one in apart))
    torch.testing.assert_close(stack.detach(), expected, rtol=0, atol=STEPS * BF16 * 0.1 * 0.2 * 12**0.5)
    assert torch.equal(parts.join(parts.split(stack)), stack)


WITH_EXPERTS = [model.name for model in registry.generated_models() if "ops.fused_moe(" in model.file.read_text()]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_gate_and_up_of_every_kind_of_experts(name):
    """Experts whose gates are zero give nothing: of no stack half of the gates and half of the ups are taken for them."""
    torch.manual_seed(0)
    generated = registry.find_model(name)
    head = getattr(generated.load(), generated.heads[0])
    model = head._from_config(small_config(head.config_class).config)
    outputs: list[torch.Tensor] = []
    for path in muon_matrices.expert_paths(model):
        owner, _, attribute = path.rpartition(".")
        experts, stack = model.get_submodule(owner), model.get_parameter(path)
        if stack.ndim != 3:
            nn.init.zeros_(stack)  # a bias
            continue
        parts = muon_matrices.gate_and_up(experts, attribute)
        assert (parts.count == 2) == ("gate" in attribute)
        if parts.count == 2:
            gates = torch.arange(2).eq(0).repeat(len(stack)).view(-1, 1, 1)
            stack.data.copy_(parts.join(parts.split(stack.data).masked_fill(gates, 0.0)))
            experts.register_forward_hook(lambda *call: outputs.append(call[-1]))
    model(input_ids=torch.arange(3, 11).unsqueeze(0))
    assert bool(outputs) == any("gate" in path for path in muon_matrices.expert_paths(model))
    assert all(not bool(output.any()) for output in outputs)


def test_biases_of_experts_are_no_matrices():
    model = registry.build_model(small_config("gpt_oss").config)
    trainable = dict(model.named_parameters())
    found = muon_matrices.muon_matrices(model, trainable, OptimConfig(name="muon"))
    assert any(name.endswith("gate_up_proj") for name in found) and not any("proj_bias" in name for name in found)
    divided = muon_matrices.muon_parts(model, found, OptimConfig(name="muon"))
    assert set(divided.values()) == {Parts(2, 1, True), Parts()}


def test_heads_by_themselves_where_asked():
    model = registry.build_model(small_config("qwen3").config)
    config = OptimConfig(name="muon", muon_by_head=("*.q_proj.weight", "*.k_proj.weight"))
    optimizer = optimizers.build(model, config)
    attention = model.model.layers[0].self_attn
    heads = model.config.num_attention_heads
    assert optimizer.parts[0].parts[attention.q_proj.weight] == Parts(heads)
    with pytest.raises(RecipeError, match=r"'\*\.gate_proj\.weight' .*found model.layers.0.mlp.gate_proj.weight"):
        optimizers.build(model, OptimConfig(name="muon", muon_by_head=("*.gate_proj.weight",)))
    with pytest.raises(RecipeError, match="found model.layers.0.self_attn.o_proj.weight"):  # its columns are heads
        optimizers.build(model, OptimConfig(name="muon", muon_by_head=("*.self_attn.*_proj.weight",)))
    with pytest.raises(RecipeError, match="found none"):
        optimizers.build(model, OptimConfig(name="muon", muon_by_head=("*.query.weight",)))
