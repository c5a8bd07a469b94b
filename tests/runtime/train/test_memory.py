"""The estimate of memory is that of live tensors where it claims to be exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_recipe import SMALL, recipe_of

from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.train import memory, model, optimizers


def test_parameters_gradients_and_states_are_those_of_live_tensors():
    recipe = recipe_of(model={"freeze": ("model.embed_tokens.*",)})
    live = model.build_on_meta(recipe)
    found = memory.estimate(live, recipe, ParallelConfig(), None, fused_loss=True)
    trained = sum(p.numel() * 4 for p in live.parameters() if p.requires_grad)
    assert found.parameters == sum(p.numel() * 4 for p in live.parameters())
    assert (found.gradients, found.optimizer) == (trained, 2 * trained)
    halves = memory.estimate(live, recipe, ParallelConfig(dp_shard=2, ep=2), torch.bfloat16, fused_loss=True)
    assert halves.parameters == pytest.approx(found.parameters / 2, rel=0.01)


def test_experts_kept_in_fp8_are_counted():
    """One form where layers are computed again, two with several micro-batches, none of weights that are gathered."""

    def gathered(kernel: str, batches: int = 1, mode: str = "none", layout: ParallelConfig | None = None) -> int:
        recipe = recipe_of(
            kernels={"fused_moe": kernel},
            train={"batches_per_step": batches},
            parallel={"activation_checkpointing": mode, "param_dtype": "bfloat16"},
        )
        built = model.build_on_meta(recipe)
        found = memory.estimate(built, recipe, layout or ParallelConfig(), torch.bfloat16, fused_loss=True)
        return found.gathered

    built = model.build_on_meta(recipe_of())
    experts = sum(p.numel() for p in built.parameters() if p.dim() == 3)
    assert experts > 0
    plain = gathered("triton")
    assert gathered("fp8") == plain
    assert gathered("fp8_wide_gradients", mode="full") == plain + experts
    assert gathered("fp8", batches=4) == plain + 2 * experts
    shards = ParallelConfig(dp_shard=2)
    assert gathered("fp8", 4, layout=shards) == gathered("triton", 4, layout=shards)
    by_experts = ParallelConfig(dp_shard=2, ep=2)
    assert gathered("fp8", 4, layout=by_experts) == gathered("triton", 4, layout=by_experts) + experts


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_states_are_as_large_as_those_of_a_live_optimizer(name):
    """Muon leaves embeddings, head, norms and stacked experts to AdamW, which keeps two states of each."""
    recipe = recipe_of(optim={"name": name})
    meta = model.build_on_meta(recipe)
    live = type(meta)._from_config(meta.config)
    optimizer = optimizers.build(live, recipe.optim)
    for parameter in live.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = [tensor for state in optimizer.state.values() for key, tensor in state.items() if key != "step"]
    found = memory.estimate(meta, recipe, ParallelConfig(), None, fused_loss=True)
    assert found.optimizer == sum(tensor.nbytes for tensor in tensors)


def test_activations_are_of_the_size_that_autograd_keeps():
    """Within a factor of two of what is saved for the backward: an estimate, not a guess."""
    recipe = recipe_of(data={"tokens_per_batch": 128})
    meta = model.build_on_meta(recipe)
    model.configure_seams(recipe, meta)
    estimate = memory.estimate(meta, recipe, ParallelConfig(), None, fused_loss=True)
    live = type(meta)._from_config(meta.config, attn_implementation="patchgen_sdpa")
    storages: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in live.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 320, (1, 128))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        live.model(input_ids=ids, use_cache=False)
    kept = sum(storages.values())
    assert kept / 2 < estimate.activations < kept * 2, (kept, estimate.activations)


def test_checkpointing_and_slices_lower_the_estimate():
    def activations(**parallel) -> int:
        recipe = recipe_of(parallel=parallel)
        layout = ParallelConfig.for_world(2, sp=parallel.get("sp", 1))
        return memory.estimate(model.build_on_meta(recipe), recipe, layout, None, fused_loss=True).activations

    assert activations(activation_checkpointing="full") < activations(activation_checkpointing="selective")
    assert activations(activation_checkpointing="selective") < activations()
    assert activations(sp=2) * 2 == activations()


def test_inputs_in_host_memory_are_counted_there():
    """Of six layers the device has the inputs of two, and the host all; attention's results are as large as the inputs here."""

    def estimate(**parallel):
        recipe = recipe_of(model={"overrides": {**SMALL, "num_hidden_layers": 6}}, parallel=parallel)
        built, layout = model.build_on_meta(recipe), ParallelConfig.for_world(2, sp=2)
        on_device = memory.estimate(built, recipe, layout, None, fused_loss=True).activations
        return on_device, memory.host_bytes(built, recipe, layout, 4)

    one_input = 256 // 2 * SMALL["hidden_size"] * 4
    for mode in ("full", "selective"):
        before, nothing = estimate(sp=2, activation_checkpointing=mode)
        after, on_host = estimate(sp=2, activation_checkpointing=mode, offload_inputs=True)
        assert (before - after, nothing, on_host) == (4 * one_input, 0, 6 * one_input)
    with_attention = estimate(sp=2, activation_checkpointing="full", offload_inputs=True, offload_attention=True)[1]
    assert with_attention == 2 * 6 * one_input


def test_of_adapters_the_estimate_counts_what_peft_would_train_and_nothing_that_is_frozen():
    import peft

    stacked = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    recipe = recipe_of(lora={"rank": 4, "target_parameters": stacked})
    found = memory.estimate(model.build_on_meta(recipe), recipe, ParallelConfig.for_world(1), None, fused_loss=True)
    wanted = peft.LoraConfig(r=4, target_modules=list(recipe.lora.target_modules), target_parameters=stacked)
    adapted = peft.get_peft_model(model.build_on_meta(recipe), wanted)
    trained = sum(4 * parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert (found.gradients, found.optimizer) == (trained, 2 * trained) and trained


def test_gradients_before_their_sum_are_counted_and_with_them_the_sum():
    """Of embeddings and head, which are one unit, and the largest part of a small model with a large vocabulary."""
    recipe = recipe_of(model={"overrides": SMALL | {"vocab_size": 32_000}}, data={"tokens_per_batch": 8})
    built = model.build_on_meta(recipe)
    vocabulary = 2 * 32_000 * 32  # embeddings and head
    sharded = memory.estimate(built, recipe, ParallelConfig(dp_shard=2), torch.bfloat16, fused_loss=True)
    assert sharded.reduction == pytest.approx(vocabulary * (2 + 4), rel=0.1), "in bfloat16, and summed in float32"
    exchanged = replace(recipe, parallel=replace(recipe.parallel, exchange_gradients=True))
    sent = memory.estimate(built, exchanged, ParallelConfig(dp_shard=2), torch.bfloat16, fused_loss=True)
    assert sent.reduction == pytest.approx(vocabulary * (2 + 2), rel=0.1)
    alone = memory.estimate(built, recipe, ParallelConfig(), None, fused_loss=True)
    assert alone.reduction == 0 and sharded.total > sharded.parameters + sharded.reduction
