"""torch.compile of generated models in one graph: forward, backward and the decode step of `generate`, beside upstream.

`aot_eager` traces and partitions as the compiler does and runs torch's own kernels: equal bits, and quick. The compiler's own
code is slow to make: `make test-slow` has it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CompileConfig, LlamaConfig, Qwen3MoeConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe

from patchgen.generated_models.llama.modeling_llama import LlamaForCausalLM
from patchgen.generated_models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM
from patchgen.runtime import ops, seams
from patchgen.runtime.parallel import checkpointing
from patchgen.runtime.verify.model_pair import perturb

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "dense": (modeling_llama.LlamaForCausalLM, LlamaForCausalLM, LlamaConfig(**SIZES)),
    "experts": (modeling_qwen3_moe.Qwen3MoeForCausalLM, Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS)),
}
IDS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(kind: str, dtype: torch.dtype):
    theirs, ours, config = MODELS[kind]
    models = [one._from_config(copy.deepcopy(config), dtype=dtype) for one in (theirs, ours)]
    perturb(models[0])
    models[1].load_state_dict(models[0].state_dict())
    return models


def step(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


def assert_close(got, expected, dtype):
    """Within rounding of the largest entry of each tensor."""
    torch.testing.assert_close(got[0], expected[0], rtol=ROUNDING[dtype], atol=0)
    for name, gradient in expected[1].items():
        bar = ROUNDING[dtype] * gradient.abs().max().item()
        torch.testing.assert_close(
            got[1][name], gradient, rtol=0, atol=bar, msg=lambda told, name=name: f"{name}: {told}"
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("kind, seam", [("dense", "eager"), ("experts", "eager"), ("experts", "torch")])
@pytest.mark.sampled(3)
def test_a_training_step_compiles_in_one_graph(kind, seam, dtype, backend):
    upstream, generated = pair(kind, dtype)
    expected = step(upstream.train())
    compiled = torch.compile(generated.train(), fullgraph=True, backend=backend)
    with seams.using(fused_moe=seam):
        loss = compiled(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in generated.named_parameters()}
    assert_close((loss.detach(), gradients), expected, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind, seam", [("dense", "eager"), ("experts", "eager"), ("experts", "torch")])
@pytest.mark.sampled(3)
def test_generate_compiles_its_decode_step_in_one_graph(kind, seam, backend):
    """As `generate` does by itself on a GPU with a static cache."""
    results = []
    for model in pair(kind, torch.float32):
        options = CompileConfig(fullgraph=True, backend=backend, mode=None)
        options._compile_all_devices = True
        with seams.using(fused_moe=seam):
            ids = model.eval().generate(
                IDS, max_new_tokens=5, cache_implementation="static", compile_config=options, do_sample=False
            )
        assert hasattr(model, "_compiled_call"), "generate compiled nothing"
        results.append(ids)
    assert torch.equal(*results)


def test_the_default_loss_compiles_with_a_head_that_caps_its_logits():
    projection, labels = torch.nn.Linear(32, 64, bias=False), IDS
    hidden_states = torch.randn(*IDS.shape, 32, generator=torch.Generator().manual_seed(0))

    def loss_of(hidden_states: torch.Tensor) -> torch.Tensor:
        def head(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(projection(x) / 30) * 30

        return ops.causal_lm_loss(head, hidden_states, labels, loss_function=ForCausalLMLoss, vocab_size=64)[1]

    with seams.using(causal_lm_loss="auto"):
        compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(hidden_states)
        torch.testing.assert_close(compiled, loss_of(hidden_states), rtol=ROUNDING[torch.float32], atol=0)


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
@pytest.mark.sampled(3)
def test_a_compiled_layer_that_keeps_less_has_the_same_gradients(mode):
    """fp32, which torch's grouped product has no trace for; with the runtime's checkpointing around each layer."""
    upstream, model = pair("experts", torch.float32)
    expected = step(upstream.train())
    model.train()
    checkpointing.apply(model, mode)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    with seams.using(fused_moe="torch"):
        assert_close(step(model), expected, torch.float32)
