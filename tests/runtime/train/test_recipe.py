"""Recipes: what is refused and in which words, what --set does, and that a printed recipe is the same recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from patchgen.runtime.train import recipe as recipes

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


@pytest.fixture
def path(tmp_path) -> Path:
    place = tmp_path / "mine.yaml"
    place.write_text("model: {source: qwen3_moe}\ndata: {sources: [{path: 'builtin:stdlib'}]}\n")
    return place


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_that_ship_are_valid_and_survive_printing(path):
    recipe = recipes.load(path)
    assert recipe.name == path.stem
    assert recipes.from_dict(yaml.safe_load(recipes.to_yaml(recipe))) == recipe
    assert recipes.from_dict(recipes.to_dict(recipe)) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_a_recipe_changes_is_all_that_it_says(path):
    recipe, values = recipes.load(path), {}
    changed = recipes.changed(recipes.to_dict(recipe))
    for key, value in changed.items():
        recipes.set_at(values, key, value)
    assert recipes.from_dict(values) == recipe
    assert len(changed) < len(recipes.flatten(recipes.to_dict(recipe))) / 3


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("lora.rank", 8, {"lora.rank": 8}),  # of a section that is not there by default only this key
        ("lora.rank", 16, {"lora": {}}),
        ("optim.betas", [0.9, 0.95], {}),
        ("optim.betas", [0.8, 0.95], {"optim.betas.0": 0.8, "optim.betas.1": 0.95}),
        ("eval_data.kind", "text", {"eval_data": {}}),
        ("train.steps", 1000, {}),
    ],
)
def test_what_has_its_default_is_not_changed(path, key, value, shown):
    before = recipes.changed(recipes.to_dict(recipes.load(path)))
    after = recipes.changed(recipes.to_dict(recipes.load(path, {key: value})))
    assert after == before | shown


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("train.ep", "2", "train.ep: no such key. Did you mean parallel.ep?"),
        ("data.path", "my.jsonl", "data.path: no such key. Did you mean data.sources.0.path?"),
        ("train.stepz", "3", "train.stepz: no such key. Did you mean steps?"),
        ("zebra", "1", "zebra: no such key. Known keys: model, data, parallel"),
        ("inputs.zebra", "{pack_dimm: 0, pack_dim: 0}", "inputs.zebra.pack_dimm: no such key. Did you mean pack_dim?"),
        (
            "inputs.zebra",
            "{pack_dim: 0, quagga: 0}",
            "quagga: no such key. Known keys: pack_dim, sliced, pad_value, pad_scale",
        ),
        ("optim.groups.0.patern", "x", "optim.groups.0.patern: no such key. Did you mean pattern?"),
        ("data.sources.0.pth", "x", "data.sources.0.pth: no such key. Did you mean path?"),
        ("train.steps", "0", "train.steps: input should be greater than or equal to 1, not 0."),
        ("optim.lr", "fast", "optim.lr: input should be a valid number"),
        ("optim.schedule", "cosin", "'constant', 'linear', 'cosine' or 'wsd', not 'cosin'"),
        ("data.tokens_per_batch", "0", "data.tokens_per_batch must be at least 1, not 0"),
        ("optim.warmup_steps", "5000", "are more than train.steps=1000"),
        ("optim.decay_steps", "5", "is for schedule 'wsd'"),
        ("optim.schedule", "wsd", "'wsd' needs optim.decay_steps"),
        ("optim.muon_lr", "1e-2", "optim.muon_lr is for optimizer 'muon'; 'adamw' would ignore it"),
        ("optim.momentum", "0.9", "optim.momentum is for optimizer 'muon'"),
        ("train.profile_start", "3", "train.profile_steps is 0"),
        ("train", "{steps: 5, profile_steps: 2}", "train.profile_start=10 is after the last of train.steps=5"),
        ("checkpoint.every", "true", "checkpoint.every: input should be a valid number, not True"),
        ("optim.lr", "true", "optim.lr: input should be a valid number, not True"),
        ("data.tokens_per_batch", "true", "data.tokens_per_batch: input should be a valid number, not True"),
        ("optim.groups", "[{pattern: x, lr: true}]", "optim.groups.0.lr: input should be a valid number, not True"),
        ("data.sources", "my.jsonl", "data.sources: input should be a list, not 'my.jsonl'"),
        ("train", "5", "train: input should be a mapping of keys to values, not 5"),
        ("data.max_frames", "8", "data.max_frames is for kind multimodal; data.kind = text would ignore it"),
        ("data.learn", "last", "data.learn is for kind chat or multimodal; data.kind = text would ignore it"),
        ("data.sources.0.media_root", "images", "has a media_root, which data.kind = text would ignore"),
        ("data.seed", "-1", "data.seed must be 0 or more, not -1"),
        ("data.sources.0.path", "*.jsonl", "To fix: quote text that YAML would read as something else"),
        ("train.eval_every", "5", "there is no section eval_data"),
        ("train.router_bias.rate", "0.1", "train.router_bias is set, but train.router_balance is not bias"),
        ("train.router_bias.rate", "0", "train.router_bias.rate: input should be greater than 0, not 0."),
        ("data.sources.3.path", "x", "'3' is not an index of a list of length 1; 1 appends to it"),
        ("train.steps.more", "x", "train.steps: input should be a valid integer, not {'more': 'x'}"),
    ],
)
def test_what_cannot_be_is_refused_by_name(path, key, value, told):
    with pytest.raises(recipes.RecipeError) as refusal:
        recipes.load(path, {key: value})
    assert told in str(refusal.value)


def test_all_problems_are_told_at_once(path):
    with pytest.raises(recipes.RecipeError, match="2 problem") as refusal:
        recipes.load(path, {"train.steps": "-1", "parallel.eq": "2"})
    assert "train.steps" in str(refusal.value)
    assert "Did you mean ep?" in str(refusal.value)


def test_true_in_place_of_a_number_is_told_beside_other_problems(path):
    changes = {
        "train.steps": "-1", "checkpoint.every": "true", "optim.groups": "[{pattern: x, lr: true}]",
        "inputs.zebra": "{pack_dim: true}", "lora": "{layers_to_transform: [1, true], merge: true}",
        "eval_data": "{seed: true}", "train.cuda_graph": "true", "model.overrides": "{use_cache: true}",
    }  # fmt: skip
    with pytest.raises(recipes.RecipeError, match="6 problem") as refusal:
        recipes.load(path, changes)
    told = str(refusal.value)
    for key in ("checkpoint.every", "optim.groups.0.lr", "inputs.zebra.pack_dim", "lora.layers_to_transform.1"):
        assert f"{key}: input should be a valid number, not True." in told
    assert "train.steps: input should be greater" in told and "eval_data.seed: " in told


def test_set_reads_values_as_yaml_and_makes_what_is_missing(path):
    changes = {"parallel.ep": "2", "optim.lr": "1e-3", "lora": "{rank: 4}", "data.sources.1.path": "b.jsonl"}
    recipe = recipes.load(
        path, changes | {"model.attention": "null", "optim.groups.0": "{pattern: '*.gate.*', lr: 1}"}
    )
    assert (recipe.parallel.ep, recipe.optim.lr, recipe.lora.rank, recipe.model.attention) == (2, 1e-3, 4, None)
    assert [source.path for source in recipe.data.sources] == ["builtin:stdlib", "b.jsonl"]
    assert recipe.optim.groups[0].lr == 1.0


def test_a_flat_recipe_has_the_keys_that_set_takes(path):
    recipe = recipes.load(path, {"optim.lr": "1e-3", "data.sources.1.path": "b.jsonl"})
    found = recipes.flatten(recipes.to_dict(recipe))
    assert (found["optim.lr"], found["data.sources.1.path"], found["model.freeze"]) == (1e-3, "b.jsonl", [])
    assert recipes.load(path, found) == recipe


def test_assignments_need_an_equals_sign():
    assert recipes.parse_overrides(["a.b=c=d", "e="]) == {"a.b": "c=d", "e": ""}
    with pytest.raises(recipes.RecipeError, match="not 'parallel.ep'"):
        recipes.parse_overrides(["parallel.ep"])


def test_what_is_not_yaml_is_told_with_its_line(path):
    with pytest.raises(recipes.RecipeError, match=r"--set model.overrides: '\{a: \[' is not YAML"):
        recipes.load(path, {"model.overrides": "{a: ["})
    path.write_text("model: {source: qwen3_moe}\ndata: {\n")
    with pytest.raises(recipes.RecipeError, match=r"(?s)mine.yaml is not YAML: .* line 3"):
        recipes.load(path)
    path.write_text("model: {source: qwen3_moe}\ntrain:\n  steps: 3\n  steps: 5\ndata: {}\n")
    with pytest.raises(recipes.RecipeError, match=r"(?s)the key 'steps' is duplicated.* line 4"):
        recipes.load(path)


def test_a_recipe_in_another_encoding_is_told(path):
    path.write_bytes("# größer\nmodel: {source: qwen3_moe}\n".encode("latin-1"))
    with pytest.raises(
        recipes.RecipeError, match=r"mine.yaml is not a text in UTF-8: .* at byte 4. To fix: save it in"
    ):
        recipes.load(path)


def test_a_missing_file_names_its_neighbours(path):
    with pytest.raises(recipes.RecipeError, match=r"There is no recipe .*other.yaml. In that folder: .*mine.yaml"):
        recipes.load(path.with_name("other.yaml"))


@given(
    steps=some.integers(1, 10**6),
    lr=some.floats(1e-9, 1.0),
    sizes=some.tuples(some.integers(1, 64), some.integers(1, 64)),
    patterns=some.lists(some.text(min_size=1, max_size=8), max_size=3),
)
def test_any_recipe_survives_printing(steps, lr, sizes, patterns):
    values = {
        "model": {"source": "qwen3", "freeze": patterns},
        "data": {"tokens_per_batch": sizes[0] * 64},
        "optim": {"lr": lr, "schedule": "linear"},
        "train": {"steps": steps, "batches_per_step": sizes[1]},
    }
    recipe = recipes.from_dict(values)
    assert recipes.from_dict(yaml.safe_load(recipes.to_yaml(recipe))) == recipe


def test_merged_keys_are_not_keys_that_stand_twice(tmp_path):
    """YAML's `<<` takes the keys of another mapping; one that stands beside it counts."""
    place = tmp_path / "merged.yaml"
    place.write_text(
        "model: {source: qwen3}\ndata: &first\n  sources: [{path: a.jsonl}]\n  seed: 1\n"
        "train: {eval_every: 5}\neval_data:\n  <<: *first\n  seed: 2\n"
    )
    loaded = recipes.load(place)
    assert (loaded.data.seed, loaded.eval_data.seed) == (1, 2)
