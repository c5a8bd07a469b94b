"""What only a GPU shows of one rank's runtime: pinned offload, recomputation, compiled layers, NCCL's own waits."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig

from patchgen.generated_models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM
from patchgen.runtime import attention, parallel, seams
from patchgen.runtime.parallel import ParallelConfig, batch, checkpointing, gradients, loss, offloaded_inputs, sharding
from patchgen.runtime.parallel.state import ParallelState

pytestmark = pytest.mark.gpu

SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32}
SIZES |= {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def state():
    if not torch.cuda.is_available():
        pytest.skip("it needs a CUDA device")
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl", init_method=f"file://{store.name}", rank=0, world_size=1)
        attention.register()
        yield ParallelState.create(ParallelConfig(), "cuda")
        dist.destroy_process_group()


def gradients_of(
    state, mode: str, keeps_attention: bool | None = None, **options
) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, use_cache=False)
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="patchgen_sdpa").train()
    checkpointing.apply(model, mode)
    if keeps_attention is not None:
        offloaded_inputs.apply(model, attention=keeps_attention)
    model.cuda()
    sharding.shard_model(model, state, options=sharding.ShardingOptions(**options))
    ids = torch.randint(0, 512, (1, 256), generator=torch.Generator().manual_seed(1))
    inputs = batch.slice_batch({"input_ids": ids, "labels": ids}, sp=1, sp_rank=0)
    inputs = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    items = loss.count_items([inputs], "cuda")
    with seams.using(fused_moe="torch"), parallel.using(state), loss.step(items):
        value = model(**inputs, num_items_in_batch=items, use_cache=False).loss
        value.backward()
    assert torch.isfinite(gradients.clip(model, max_norm=1e9))
    return float(value), {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_that_keeps_less_has_the_same_gradients(state, mode, compiled):
    """Every gradient in fp32 against keeping everything; offloaded activations come back from pinned memory whole."""
    expected_loss, expected = gradients_of(state, "none")
    value, got = gradients_of(state, mode, compile_layers=compiled)
    assert abs(value - expected_loss) < 1e-5 * abs(expected_loss)
    for name, gradient in got.items():
        distance = (gradient - expected[name]).norm() / expected[name].norm().clamp(min=1e-12)
        assert distance < (1e-4 if compiled else 1e-5), f"{name}: {distance:.1e}"


@pytest.mark.parametrize(("mode", "attention"), [("full", False), ("selective", False), ("full", True)])
def test_inputs_in_host_memory_have_the_same_gradients(state, mode, attention):
    """Copies on a stream of their own, through pinned memory."""
    expected_loss, expected = gradients_of(state, mode)
    value, got = gradients_of(state, mode, keeps_attention=attention)
    assert value == expected_loss
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_parameters_in_host_memory_have_the_same_gradients(state):
    expected_loss, expected = gradients_of(state, "none")
    value, got = gradients_of(state, "none", cpu_offload=True)
    assert abs(value - expected_loss) < 1e-5 * abs(expected_loss)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
