"""--dry-run: what it says, and that its memory is that of live tensors where it claims to be exact."""

from __future__ import annotations

import pytest
import torch

from patchgen.runtime.data import DataError
from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.train import memory, model, plan
from patchgen.runtime.train.recipe import RecipeError, from_dict

SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def recipe_of(**sections: dict):
    base = {"source": "qwen3_moe", "overrides": SMALL}
    values = {"model": base, "data": {"tokens_per_batch": 256}, "train": {"steps": 10, "batches_per_step": 8}}
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return from_dict(values)


def test_a_dry_run_says_what_would_run():
    text = plan.describe(recipe_of(parallel={"ep": 2, "sp": 2}), world=8)
    assert "batches_per_step: 8" in text, "the recipe with its defaults"
    assert "ep groups (share the experts; tokens are exchanged): [0 1] [2 3]" in text
    assert "Qwen3MoeForCausalLM, 0.1 M parameters" in text
    assert "8 batches of up to 256 tokens, 2 per batch group" in text
    assert "fused_moe    auto" in text and "rms_norm     eager" in text
    assert "3 layers" in text
    assert "memory of one rank (estimate)" in text


@pytest.mark.parametrize(
    ("sections", "world", "told"),
    [
        ({"parallel": {"ep": 3}}, 3, "does not divide"),
        ({"parallel": {"ep": 16}}, 16, "which ep=16 does not divide evenly"),
        ({"parallel": {"sp": 3}}, 4, "parallel: dp_replicate=1 times sp=3 does not divide the 4 ranks"),
        ({"kernels": {"swiglu": "compiled"}}, 1, "no module of this model calls that seam"),
        ({"model": {"overrides": {"hiden_size": 64}}}, 1, "has no such field. Near: hidden_size"),
        ({"model": {"source": "qwen3_mo"}}, 1, "no model type"),
        ({"model": {"freeze": ["model.vision.*"]}}, 1, "'model.vision.*' matches no parameter"),
        ({"optim": {"groups": [{"pattern": "model.nope.*"}]}}, 1, "'model.nope.*' matches no trained parameter"),
        ({"lora": {"target_modules": ["nope"]}}, 1, "lora.target_modules: nope match nothing"),
    ],
)
def test_what_cannot_run_is_refused(sections, world, told, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises((RecipeError, ValueError)) as refusal:
        plan.describe(recipe_of(train={"batches_per_step": world * 4}, **sections), world)
    assert told in str(refusal.value)


def test_a_dry_run_names_data_that_are_not_there(tmp_path):
    missing = str(tmp_path / "my.jsonl")
    with pytest.raises(DataError, match="my.jsonl"):
        plan.describe(recipe_of(data={"sources": [{"path": missing}]}), world=8)


def test_a_dry_run_fetches_no_weights(monkeypatch):
    def fetch(*args, **options):
        raise AssertionError("downloaded")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    config = model.read_config(recipe_of().model)
    monkeypatch.setattr(model, "read_config", lambda section: config)
    assert "weights: some/model" in plan.describe(recipe_of(model={"source": "some/model", "overrides": {}}), world=8)


def test_updates_that_would_round_to_nothing_are_told():
    with pytest.warns(UserWarning, match="most updates round to nothing"):
        plan.require_valid(recipe_of(model={"dtype": "bfloat16"}), world=1)


def test_parameters_gradients_and_states_are_those_of_live_tensors():
    recipe = recipe_of(model={"freeze": ("model.embed_tokens.*",)})
    live = model.build_on_meta(recipe)
    found = memory.estimate(live, recipe, ParallelConfig(), None, fused_loss=True)
    trained = sum(p.numel() * 4 for p in live.parameters() if p.requires_grad)
    assert found.parameters == sum(p.numel() * 4 for p in live.parameters())
    assert (found.gradients, found.optimizer) == (trained, 2 * trained)
    halves = memory.estimate(live, recipe, ParallelConfig(dp_shard=2, ep=2), torch.bfloat16, fused_loss=True)
    assert halves.parameters == pytest.approx(found.parameters / 2, rel=0.01)


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
