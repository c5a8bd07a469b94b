"""`experts_implementation="patchgen"` in plain transformers models, against their eager experts."""

from __future__ import annotations

import pytest
import torch
from rounding import require_equal_up_to_rounding
from transformers import AutoModelForCausalLM, GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from patchgen.kernels import transformers_experts

transformers_experts.register()

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def qwen3_moe() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**SMALL, vocab_size=64, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize(
    ("experts", "config"),
    [
        (Qwen3MoeExperts, qwen3_moe()),
        (GptOssExperts, GptOssConfig(**SMALL, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)),
        (NemotronHExperts, NemotronHConfig(hidden_size=32, moe_intermediate_size=16, n_routed_experts=4)),
    ],
    ids=["qwen3_moe", "gpt_oss", "nemotron_h"],
)
def test_experts_modules_equal_their_eager_forward(experts: type, config):
    torch.manual_seed(0)
    module = experts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    width = module.down_proj.shape[1 if not module.is_transposed else 2]
    hidden, index, weights = torch.randn(11, width), torch.randint(0, 4, (11, 2)), torch.rand(11, 2)
    results = []
    for implementation in ("eager", transformers_experts.NAME):
        config._experts_implementation = implementation
        x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        out = module(x, index, w)
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, w, *module.parameters()])))
    for eager, ours in zip(*results, strict=True):
        require_equal_up_to_rounding(ours, eager)


def test_a_model_takes_it_by_name():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(qwen3_moe(), experts_implementation="eager")
    ids = torch.randint(0, 64, (1, 9))
    expected = model(ids).logits
    model.set_experts_implementation(transformers_experts.NAME)
    assert model.config._experts_implementation == transformers_experts.NAME
    require_equal_up_to_rounding(model(ids).logits, expected)
